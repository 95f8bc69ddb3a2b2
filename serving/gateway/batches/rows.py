"""The rows of a batch's output and error files. Source: OpenAI's API reference, "Batch", the request output object."""

import secrets

import msgspec

from moonshard.serving.gateway.batches.records import LineError

_ID_BYTES = 12
_UNWRITTEN = msgspec.Raw(b"null")


def answered_row(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Of a line that a route has answered, with whatever status. `body`: JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body or _UNWRITTEN)}
    return _row(custom_id, response, None)


def broken_row(custom_id: str | None, error: LineError) -> bytes:
    """Of a line that was never asked."""
    return _row(custom_id, None, {"code": error.code, "message": error.message, "line": error.line})


def unasked_row(custom_id: str | None, status: str) -> bytes:
    """Of a line that has no answer, since its batch was cancelled or has expired."""
    return _row(custom_id, None, {"code": f"batch_{status}", "message": f"the batch was {status} before this line ran"})


def _row(custom_id: str | None, response: object, error: object) -> bytes:
    row = {
        "id": f"batch_req_{secrets.token_hex(_ID_BYTES)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(row)
