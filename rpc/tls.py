"""TLS from PEM files, for both ends of a channel.

Certificates are not issued, reloaded or revoked here: restart the process, or put a proxy in front.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """What a server shows and, with `client_ca`, whom it lets in (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Raises OSError for a file that cannot be read."""
    client_ca = files.client_ca.read_bytes() if files.client_ca else None
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def channel_credentials(
    *, root_ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """Trusts `root_ca`, or gRPC's own roots; shows `cert` where the server asks for one. Raises OSError as above."""
    root, chain, private = (path.read_bytes() if path else None for path in (root_ca, cert, key))
    return grpc.ssl_channel_credentials(root_certificates=root, private_key=private, certificate_chain=chain)
