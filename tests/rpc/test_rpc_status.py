"""Errors keep their class, message, field and delay across the wire, and get the right names in every protocol."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import (
    DETAILS_KEY,
    ERRORS,
    MAX_MESSAGE_BYTES,
    ContextLengthExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
    TooLarge,
    Unavailable,
    UnsupportedEncoding,
    error_from_code,
    from_rpc_error,
    openai_error,
    to_status,
)


def as_rpc_error(error: RequestError) -> grpc.RpcError:
    status = to_status(error)
    return rpc_error(status.code, status.details, *status.trailing_metadata)


def rpc_error(code: grpc.StatusCode, details: str, *trailing: tuple[str, str | bytes]) -> grpc.RpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def facts(error: RequestError) -> tuple:
    return type(error), error.message, error.field, error.retry_after_s


def test_the_tree_has_no_class_outside_the_table():
    """Elsewhere there may be errors that a process keeps to itself: they are translated before they reach an edge."""
    found, pending = set(), [RequestError]
    while pending:
        kinds = [kind for kind in pending.pop().__subclasses__() if kind.__module__ == RequestError.__module__]
        found.update(kinds)
        pending += kinds
    assert set(ERRORS) == found


@given(
    kind=st.sampled_from(ERRORS),
    message=st.text(max_size=100),
    field=st.none() | st.text(min_size=1, max_size=30),
    retry_after_s=st.none() | st.integers(0, 10**12).map(lambda us: us / 1e6),
)
def test_every_error_comes_back_as_it_was(kind, message, field, retry_after_s):
    error = kind(message, field=field, retry_after_s=retry_after_s)
    assert facts(from_rpc_error(as_rpc_error(error))) == facts(error)


@pytest.mark.parametrize("kind", ERRORS)
async def test_every_error_crosses_the_wire(kind, inference, target):
    error = kind("the message", field="stop[1]", retry_after_s=1.5)
    inference.script = [error]
    async with AsyncClient(target) as client:
        with pytest.raises(kind) as caught:
            await client.generate("x")
    assert facts(caught.value) == facts(error)


async def test_an_error_too_long_for_a_header_arrives_cut(inference, target):
    inference.script = [InvalidArgument("月" * 50_000, field="字" * 50_000, retry_after_s=1)]
    async with AsyncClient(target) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.generate("x")
    assert caught.value.message.startswith("月月")
    assert caught.value.message.endswith("月…")
    assert len(caught.value.message.encode()) <= MAX_MESSAGE_BYTES


def test_a_message_with_a_lone_surrogate_is_still_a_status():
    assert to_status(InternalError("a\ud800b")).details == "a?b"


def test_delay_is_also_said_in_whole_seconds_rounded_up():
    assert dict(to_status(Overloaded("full", retry_after_s=1.2)).trailing_metadata)["retry-after"] == "2"
    assert (
        dict(to_status(Overloaded("full", retry_after_s=0.0)).trailing_metadata)["retry-after"] == "1"
    )  # not: at once
    assert "retry-after" not in dict(to_status(Overloaded("full")).trailing_metadata)


def test_details_are_those_of_google_rpc():
    status = to_status(InvalidArgument("no", field="top_p", retry_after_s=0.25))
    details = dict(status.trailing_metadata)[DETAILS_KEY]
    assert isinstance(details, bytes)
    rich = status_pb2.Status.FromString(details)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail, message in zip(rich.details, (info, bad, retry), strict=True):
        assert detail.Unpack(message)
    assert (rich.code, rich.message, info.reason) == (3, "no", "InvalidArgument")
    assert bad.field_violations[0].field == "top_p"
    assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
        (grpc.StatusCode.OUT_OF_RANGE, InvalidArgument),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_a_foreign_status_gets_the_class_of_its_code(code, kind):
    assert type(from_rpc_error(rpc_error(code, "why"))) is kind
    assert "why" in from_rpc_error(rpc_error(code, "why")).message


def test_details_of_another_domain_do_not_name_our_classes():
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="NotFound", domain="example.org"))
    rich = status_pb2.Status(code=14, message="m", details=[detail]).SerializeToString()
    assert type(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "m", (DETAILS_KEY, rich)))) is Unavailable


def test_details_that_do_not_parse_leave_code_and_message():
    error = from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, "m", (DETAILS_KEY, b"\xff\xff")))
    assert facts(error) == (NotFound, "m", None, None)


# these share InvalidArgument's code
SHARING_A_CODE = (TooLarge, ContextLengthExceeded, UnsupportedEncoding, RequestTimeout)


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in SHARING_A_CODE])
def test_a_code_number_gives_the_class_back(kind):
    assert facts(error_from_code(kind.code.value[0], "m", "f", 2.0)) == (kind, "m", "f", 2.0)


def test_a_number_that_is_no_code_is_internal():
    assert facts(error_from_code(99, "m")) == (InternalError, "status code 99: m", None, None)


def test_openai_body_of_a_bad_field():
    body = openai_error(InvalidArgument("top_p must be in (0, 1]", field="top_p"))
    expected = {"message": "top_p must be in (0, 1]", "type": "invalid_request_error", "param": "top_p"}
    assert body == {"error": expected | {"code": "invalid_value"}}


def test_openai_code_of_a_missing_model_is_openais_own():
    assert openai_error(NotFound("no such model", field="model"))["error"]["code"] == "model_not_found"
    assert openai_error(NotFound("no such route"))["error"]["code"] == "not_found"


@pytest.mark.parametrize("kind", ERRORS)
def test_http_status_agrees_with_who_is_at_fault(kind):
    is_clients_fault = kind.http_status < 500
    assert is_clients_fault == (kind.openai_type in {"invalid_request_error", "rate_limit_exceeded"})
