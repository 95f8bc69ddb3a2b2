"""The seed of a request that says none: random, unless its client named it so that it may be asked again.

Then every gateway of the cluster takes the same seed, with nothing shared but the cluster's key: a client that lost one
gateway asks another, and draws the same tokens. A tenant cannot tell another's seeds, nor choose its own by the name:
the hash is keyed.
"""

import hashlib
import hmac
import secrets

from moonshard.serving.control.sampling_parameters import SEED_BITS
from moonshard.serving.gateway.caller import Caller


class Seeds:
    """`key` is the cluster's for them."""

    def __init__(self, key: bytes):
        self._key = key

    def of(self, caller: Caller) -> int:
        """A seed below 2 ** SEED_BITS."""
        if caller.idempotency_key is None:
            return secrets.randbits(SEED_BITS)
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in ("moonshard seed", caller.tenant.name, caller.idempotency_key):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "big"))
            digest.update(encoded)
        return int.from_bytes(digest.digest()[: SEED_BITS // 8], "big")
