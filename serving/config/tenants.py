"""Who a request is from: an API key names a tenant, whose KV nobody else's request finds.

Keys are kept as hashes, so that the file that names them is no secret worth stealing; a tenant may have several. The
salt that goes into the names of a tenant's blocks comes from here and never from a client; it is derived from the
cluster's key, so that nobody outside can name a block, and the same after a restart. Without a file of keys there is
one tenant, and everybody is let in. Tenants' rates are kept in `gateway.records.accounts.rates`.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BEARER = "bearer "
DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")


class KeyFileError(ValueError):
    """A key file that cannot be served; the message names file and entry."""


class UnknownKey(Exception):
    """No key, or one that names nobody."""


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str


class Salts:
    """What makes the names of a tenant's blocks its own; `key` is the cluster's for them."""

    def __init__(self, key: bytes):
        self._key = key

    def of(self, tenant: Tenant) -> bytes:
        return hmac.digest(self._key, b"moonshard tenant\0" + tenant.name.encode(), hashlib.sha256)


class Tenants:
    """The tenants by their keys."""

    def __init__(self, by_hash: Mapping[str, Tenant] | None):
        """None: one tenant for all."""
        self._by_hash = by_hash

    def of(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header, or of a gRPC call's metadata of that name. Raises UnknownKey."""
        if self._by_hash is None:
            return Tenant(DEFAULT)
        if not authorization:
            raise UnknownKey("no API key was given: expected `Authorization: Bearer KEY` or `x-api-key: KEY`")
        if authorization[: len(BEARER)].lower() != BEARER:
            raise UnknownKey("the Authorization header is not of the form `Bearer KEY`")
        found = self._by_hash.get(hash_key(authorization[len(BEARER) :].strip()))
        if found is None:
            raise UnknownKey("the API key is not known here")
        return found


def hash_key(key: str) -> str:
    """One round without a salt: enough for keys that are long and random, which nobody can guess."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def load_tenants(path: Path | None) -> Tenants:
    """A TOML file with a table `keys`: the SHA-256 of each key in hex, and its tenant's name.

    Raises:
        KeyFileError: naming what is wrong in it, or why it cannot be read.
    """
    if path is None:
        return Tenants(None)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFileError(f"gateway.keys: {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KeyFileError(f"gateway.keys: {path}: {error}") from error
    keys = tree.get("keys")
    if tree.keys() != {"keys"} or not isinstance(keys, dict):
        raise KeyFileError(f"gateway.keys: {path}: expected one table, [keys]")
    for key, name in keys.items():
        if not _HASH.fullmatch(key):
            raise KeyFileError(f"gateway.keys: {path}: {key[:16]!r} is not the SHA-256 of a key in hex")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise KeyFileError(f"gateway.keys: {path}: {name!r} is no tenant's name: at most 64 letters, digits, ._-")
    return Tenants({key: Tenant(name) for key, name in keys.items()})
