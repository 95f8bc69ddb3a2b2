"""Chunks of a stream, byte for byte: most are put together from parts that were encoded before."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import inference_pb2 as pb
from moonshard.serving.gateway.openai.responses import ChatFormat, Chunks, CompletionFormat, Envelope, Format

FORMATS = (ChatFormat(None), CompletionFormat(None))


def envelope(**wanted: bool) -> Envelope:
    return Envelope(
        id='cmpl-"1"', model="a model", fingerprint="0" * 64, has_logprobs=False, has_token_ids=False, **wanted
    )


def chunk_of(told: Envelope, form: Format, delta: pb.Delta, **more: object) -> bytes:
    """The chunk as an encoder gives it that knows nothing of parts."""
    choices = [form.chunk_choice(delta, None)]
    return b"data: " + msgspec.json.encode({**told.head(form.chunk_kind), "choices": choices, **more}) + b"\n\n"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.kind)
@given(texts=st.lists(st.tuples(st.integers(0, 3), st.text(min_size=1)), min_size=1, max_size=6))
def test_a_chunk_with_text_is_what_encoding_it_whole_gives(form: Format, texts: list[tuple[int, str]]):
    told = envelope()
    chunks = Chunks(told, form)
    for choice, text in texts:
        delta = pb.Delta(choice=choice, token_ids=[1], text=text)
        assert chunks.delta(delta).endswith(chunk_of(told, form, delta))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.kind)
def test_the_last_chunk_and_one_with_usage_say_so_behind_chunks_that_did_not(form: Format):
    told = envelope(has_usage=True)
    chunks = Chunks(told, form)
    for reason in (pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_LENGTH):
        delta = pb.Delta(token_ids=[1], text="x", finish_reason=reason)
        assert chunks.delta(delta).endswith(chunk_of(told, form, delta, usage=None))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.kind)
def test_a_delta_without_text_tells_nothing_but_that_a_choice_has_begun(form: Format):
    chunks = Chunks(envelope(), form)
    held = pb.Delta(token_ids=[1])
    opening = form.opening(0)
    assert bool(chunks.delta(held)) == (opening is not None)
    assert chunks.delta(held) == b""
