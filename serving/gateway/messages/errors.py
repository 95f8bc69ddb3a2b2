"""Errors in Anthropic's shape. Its clients look at the status, and at the message where a prompt is too long."""

from collections.abc import Mapping

from moonshard.rpc.status import ContextLengthExceeded, RequestError, openai_error

PATH = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: RequestError) -> dict[str, object]:
    message = str(openai_error(error)["error"]["message"])  # cut to what an answer may hold
    if isinstance(error, ContextLengthExceeded):
        is_of_answer = error.field == "max_tokens"  # clients make a prompt shorter at the other words
        begun = "input length and `max_tokens` exceed context limit" if is_of_answer else "prompt is too long"
        message = f"{begun}: {message}"
    return anthropic_http_error(error.http_status, message)


def anthropic_http_error(status: int, message: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": _TYPES.get(status, "invalid_request_error"), "message": message}}
