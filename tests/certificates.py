"""Certificates for tests of TLS, made with openssl: self-signed ones, and those that an authority issues."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonshard.serving.config.keys import TlsConfig

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """(certificate, key), `name`.pem and `name`.key: for 127.0.0.1, and an authority for itself."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    openssl("req", "-x509", *NEW_KEY, *subject, "-keyout", key, "-out", cert)
    return cert, key


class Authority:
    """Issues certificates, and its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl("req", "-x509", *NEW_KEY, "-keyout", self._key, "-out", self.cert, "-subj", f"/CN={name}")

    def issue(self, name: str, *, address: str = "127.0.0.1", names: Sequence[str] = ()) -> TlsConfig:
        """A certificate for that address and those names of hosts, to be used with this authority's own."""
        cert, key, extensions = (self._folder / f"{name}.{end}" for end in ("pem", "key", "ext"))
        request = cert.with_suffix(".csr")
        openssl("req", *NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        subjects = ",".join((f"IP:{address}", *(f"DNS:{host}" for host in names)))
        extensions.write_text(f"subjectAltName={subjects}\n")
        signing = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions)
        openssl("x509", "-req", "-in", request, *signing, "-out", cert)
        return TlsConfig(cert=cert, key=key, ca=self.cert)
