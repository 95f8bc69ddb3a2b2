"""What a request for a batch may ask. Source: OpenAI's API reference, "Create batch"."""

import re
import secrets
import time
from collections.abc import Mapping

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.batches.records import BatchRecord
from moonshard.serving.gateway.openai.body import ABSENT, BodyDecoder, is_nothing
from moonshard.serving.gateway.quoted import quoted

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_WINDOW_S = 7 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw = ABSENT


DECODER = BodyDecoder(BatchBody)


def batch_meant(body: BatchBody, tenant: str) -> BatchRecord:
    """InvalidArgument naming what is not served."""
    if body.endpoint not in ENDPOINTS:
        raise InvalidArgument(f"endpoint: must be one of {', '.join(ENDPOINTS)}", field="endpoint")
    if not is_nothing(body.output_expires_after):
        raise InvalidArgument("output_expires_after is not supported", field="output_expires_after")
    _check_metadata(body.metadata or {})
    now = int(time.time())
    return BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        tenant=tenant,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        status="validating",
        created_at=now,
        expires_at=now + _window_s(body.completion_window),
        stamps={},
    )


def _window_s(said: str) -> int:
    found = _WINDOW.fullmatch(said)
    seconds = 0 if found is None else int(found[1]) * _UNIT_S[found[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        name = "completion_window"
        raise InvalidArgument(f"{name}: must be as 24h, 90m or 2d, and at most 7d, not {quoted(said)}", field=name)
    return seconds


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidArgument(f"metadata: at most {MAX_METADATA} pairs, not {len(metadata)}", field="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise InvalidArgument(
                f"metadata: keys have at most {MAX_KEY_CHARS} characters, values {MAX_VALUE_CHARS}", field="metadata"
            )
