"""Files and batches as the API shows them. Source: OpenAI's API reference, "Files" and "Batch"."""

from collections.abc import Sequence

from moonshard.serving.gateway.batches.records import ENDED, STAMPS, BatchRecord, FileRecord, LineError


def file_object(record: FileRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": None,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(record: BatchRecord, trouble: str | None = None) -> dict[str, object]:
    """`trouble`: why the store takes nothing at present, which a batch that has not ended says as its error."""
    errors = record.errors
    if trouble is not None and record.status not in ENDED:
        errors = (LineError(code="paused", message=trouble),)
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": {"object": "list", "data": [_error(each) for each in errors]} if errors else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id,
        "error_file_id": record.error_file_id,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{stamp: record.stamps.get(stamp) for stamp in STAMPS},
        "request_counts": {
            "total": record.num_total,
            "completed": record.num_completed,
            "failed": record.num_failed,
        },
        "metadata": record.metadata,
    }


def page(objects: Sequence[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    return {
        "object": "list",
        "data": objects,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def _error(error: LineError) -> dict[str, object]:
    return {"code": error.code, "line": error.line, "message": error.message, "param": None}
