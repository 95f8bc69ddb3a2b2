"""Mutual TLS between the processes of a deployment, from [tls]: what a worker shows and demands, and a gateway.

Both sides show the same kind of certificate and believe the same authority, so one pair per machine serves its workers
and its gateway. Files are read and checked here, when a process starts: a pair that does not match is a message that
names the key, not a handshake that fails later. Not covered are the public API (put a proxy in front), reloading and
revoking, and Mooncake, which knows neither encryption nor authentication (see `faults`).
"""

import ssl

import grpc

from moonshard.rpc.tls import TlsFiles, channel_credentials
from moonshard.serving.config.keys import Config, ConfigError, TlsConfig


def server_tls(config: Config) -> TlsFiles | None:
    """What a worker's server shows, and whom it lets in; None for plain text. ConfigError for files of no use."""
    tls = config.tls
    if tls.cert is None or tls.key is None or tls.ca is None:
        return None
    _check(tls)
    return TlsFiles(cert=tls.cert, key=tls.key, client_ca=tls.ca)


def link_credentials(config: Config) -> grpc.ChannelCredentials | None:
    """What one who calls a worker shows and believes: a gateway, or a prefill worker whose KV goes by gRPC.

    None for plain text. The worker's certificate must name the host by which it is called. ConfigError as above.
    """
    tls = config.tls
    if not tls.is_complete:
        return None
    _check(tls)
    return channel_credentials(root_ca=tls.ca, cert=tls.cert, key=tls.key)


def _check(tls: TlsConfig) -> None:
    """Reads and checks the files: gRPC takes any bytes, and says nothing until a handshake fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(str(tls.cert), str(tls.key), password="")  # an encrypted key would ask the terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            [f"tls.cert, tls.key: {tls.cert} and {tls.key} are no matching PEM pair ({error})"]
        ) from error
    try:
        context.load_verify_locations(str(tls.ca))
    except (OSError, ValueError) as error:
        raise ConfigError([f"tls.ca: {tls.ca} holds no PEM certificate ({error})"]) from error
