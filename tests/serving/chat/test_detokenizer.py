"""A stream's text is the whole text cut at its stop string, however tokens are grouped, and never waits too long."""

import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonshard.models.tokenizers.tokenizer import TokenIdError, Tokenizer, load_tokenizer
from moonshard.serving.chat.detokenizer import Detokenizer

KIMI = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
END, ASSISTANT = 2018, 2020


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(KIMI)
    assert tokenizer is not None
    return tokenizer


def bytes_to_ids(data: bytes) -> list[int]:
    """One token per byte: the first 256 ids are the single bytes, in the order of GPT-2's alphabet."""
    return [SINGLE_BYTES[byte] for byte in data]


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
SINGLE_BYTES = {byte: i for i, byte in enumerate([*PRINTABLE, *(byte for byte in range(256) if byte not in PRINTABLE)])}

few_bytes = st.binary(max_size=30) | st.text("ab🙂é", max_size=20).map(str.encode)
any_ids = st.lists(st.integers(0, 2047) | st.sampled_from([END, ASSISTANT]), max_size=30)
token_ids = any_ids | few_bytes.map(bytes_to_ids) | st.text("ab", max_size=20).map(str.encode).map(bytes_to_ids)
stop_texts = st.text("ab", min_size=1, max_size=4) | st.text("ab🙂é\ufffd", min_size=1, max_size=4)
stops = st.lists(stop_texts | st.text(min_size=1, max_size=3), max_size=3)


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks: list[list[int]] = []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return [*chunks, ids]


def first_stop(text: str, stop: list[str], start: int = 0) -> tuple[int, str] | None:
    """Where the text is cut and by what: the stop string complete first, the longest of several."""
    for end in range(start + 1, len(text) + 1):
        completed = [string for string in stop if text[:end].endswith(string)]
        if completed:
            longest = max(completed, key=len)
            return end - len(longest), longest
    return None


def test_the_single_byte_tokens_are_where_these_tests_expect_them(tokenizer: Tokenizer):
    assert all(tokenizer.token_bytes(i) == bytes([byte]) for byte, i in SINGLE_BYTES.items())


@given(ids=token_ids, sizes=st.lists(st.integers(0, 5), max_size=30), stop=stops, skip_special=st.booleans())
@example(ids=bytes_to_ids(b"\xf0\x9f\x99"), sizes=[1, 1], stop=[], skip_special=True)
@example(ids=bytes_to_ids(b"\xe4\xbd\xffa"), sizes=[1, 1], stop=["\ufffda"], skip_special=True)
@example(ids=[*bytes_to_ids(b"\xe4\xbd"), END, *bytes_to_ids(b"\xa0")], sizes=[], stop=[], skip_special=True)
@example(ids=bytes_to_ids(b"cab"), sizes=[], stop=["b", "ab"], skip_special=True)
@example(ids=bytes_to_ids(b"aabaabaaa"), sizes=[1] * 9, stop=["aabaaa"], skip_special=True)
def test_the_text_is_the_whole_text_cut_at_the_first_stop_string(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str], skip_special: bool
):
    whole = tokenizer.decode(ids, skip_special=skip_special)
    cut = first_stop(whole, stop)
    detokenizer = Detokenizer(tokenizer, stop=stop, skip_special=skip_special)
    text = "".join(detokenizer.push(chunk).text for chunk in chunked(ids, sizes)) + detokenizer.finish()
    assert text == (whole if cut is None else whole[: cut[0]])
    assert detokenizer.stop_string == (None if cut is None else cut[1])


@given(ids=token_ids, sizes=st.lists(st.integers(0, 5), max_size=30), stop=stops)
def test_no_stop_string_is_ever_emitted(tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str]):
    detokenizer = Detokenizer(tokenizer, stop=stop)
    text = "".join(detokenizer.push(chunk).text for chunk in chunked(ids, sizes)) + detokenizer.finish()
    assert not any(string in text for string in stop)


@given(ids=token_ids, stop=stops)
def test_held_back_text_is_shorter_than_the_longest_stop_string(tokenizer: Tokenizer, ids: list[int], stop: list[str]):
    detokenizer = Detokenizer(tokenizer, stop=stop)
    emitted = ""
    for position, token_id in enumerate(ids, start=1):
        piece = detokenizer.push([token_id])
        emitted += piece.text
        if piece.stop_string is not None:
            return
        complete = tokenizer.decode(ids[:position])
        held = complete[len(emitted) :].rstrip("\ufffd")  # which may stand for a character that is not complete
        assert len(held) <= max((len(string) for string in stop), default=1) - 1


@given(ids=token_ids, sizes=st.lists(st.integers(0, 5), max_size=30), stop=stops, min_tokens=st.integers(0, 12))
@example(ids=bytes_to_ids(b"ab"), sizes=[], stop=["b"], min_tokens=2)
@example(ids=bytes_to_ids(b"ab"), sizes=[], stop=["b"], min_tokens=3)
@example(ids=bytes_to_ids(b"ababa"), sizes=[], stop=["aba"], min_tokens=4)
def test_a_stop_string_counts_only_if_completed_by_a_late_enough_token(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str], min_tokens: int
):
    alone = Detokenizer(tokenizer)
    num_early_chars = sum(len(alone.push([token_id]).text) for token_id in ids[: max(min_tokens - 1, 0)])
    whole = tokenizer.decode(ids)
    if len(ids) < min_tokens:
        num_early_chars = len(whole)
    cut = first_stop(whole, stop, start=num_early_chars)
    detokenizer = Detokenizer(tokenizer, stop=stop, min_tokens=min_tokens)
    text = "".join(detokenizer.push(chunk).text for chunk in chunked(ids, sizes)) + detokenizer.finish()
    assert detokenizer.stop_string == (None if cut is None else cut[1])
    # what came before the late tokens may have left already
    assert text == (whole if cut is None else whole[: cut[0]])


@given(ids=token_ids, stop=stops)
def test_one_push_counts_the_tokens_that_single_pushes_would(tokenizer: Tokenizer, ids: list[int], stop: list[str]):
    single = Detokenizer(tokenizer, stop=stop)
    num_tokens = sum(single.push([token_id]).num_tokens for token_id in ids)
    piece = Detokenizer(tokenizer, stop=stop).push(ids)
    assert piece.num_tokens == num_tokens
    assert piece.stop_string is not None or num_tokens == len(ids)


def test_a_stop_string_begun_in_an_earlier_push_is_held_back(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer, stop=["STOP"])
    assert detokenizer.push(bytes_to_ids(b"a ST")).text == "a "
    assert detokenizer.push(bytes_to_ids(b"ST")).text == "ST"
    piece = detokenizer.push(bytes_to_ids(b"OP!"))
    assert (piece.text, piece.stop_string, piece.num_tokens) == ("", "STOP", 2)


def test_after_a_stop_string_everything_is_dropped(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer, stop=["b"])
    assert detokenizer.push(bytes_to_ids(b"ab")).text == "a"
    piece = detokenizer.push(bytes_to_ids(b"cb"))
    assert (piece.text, piece.stop_string, piece.num_tokens) == ("", "b", 0)
    assert detokenizer.finish() == ""


def test_finishing_flushes_once(tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer, stop=["abc"])
    assert detokenizer.push(bytes_to_ids("ab🙂".encode()[:-1])).text == "ab"[:0]
    assert (detokenizer.finish(), detokenizer.finish()) == ("ab\ufffd", "")


def test_special_tokens_show_only_where_asked(tokenizer: Tokenizer):
    assert Detokenizer(tokenizer).push([END]).text == ""
    shown = Detokenizer(tokenizer, skip_special=False, stop=["<|im_end|>"])
    assert shown.push([*bytes_to_ids(b"a"), END]).stop_string == "<|im_end|>"


MARKS = {END: "\ud800", ASSISTANT: "\ud801"}


@given(
    ids=token_ids,
    sizes=st.lists(st.integers(0, 5), max_size=30),
    stop=st.lists(stop_texts, max_size=3),
    skip=st.booleans(),
)
@example(ids=[*bytes_to_ids(b"\xe4\xbd"), END, *bytes_to_ids(b"\xa0")], sizes=[], stop=[], skip=True)
@example(ids=[*bytes_to_ids(b"a"), END, *bytes_to_ids(b"b")], sizes=[], stop=["ab"], skip=True)
@example(ids=[*bytes_to_ids(b"ab"), END], sizes=[2], stop=["abc"], skip=True)
def test_a_marked_token_stands_as_its_mark_between_the_texts_around_it(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str], skip: bool
):
    pieces: list[list[int]] = [[]]
    whole = ""
    for token_id in ids:
        if token_id in MARKS:
            whole += tokenizer.decode(pieces[-1], skip_special=skip) + MARKS[token_id]
            pieces.append([])
        else:
            pieces[-1].append(token_id)
    whole += tokenizer.decode(pieces[-1], skip_special=skip)
    cut = first_stop(whole, stop)
    detokenizer = Detokenizer(tokenizer, stop=stop, skip_special=skip, marks=MARKS)
    text = "".join(detokenizer.push(chunk).text for chunk in chunked(ids, sizes)) + detokenizer.finish()
    assert text == (whole if cut is None else whole[: cut[0]])


def test_an_unknown_id_is_named(tokenizer: Tokenizer):
    with pytest.raises(TokenIdError, match="no token 2048 "):
        Detokenizer(tokenizer).push([2048])


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(tokenizer, stop=[""])


def test_a_sentence_piece_stream_drops_its_leading_space_once(tmp_path: Path):
    shutil.copy(KIMI / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(SENTENCE_PIECE)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]).text for token_id in (2, 0, 0, 1)] == ["", "a", " a", "b"]
    marked = Detokenizer(tokenizer, marks={2: "\ud800"})  # a mark is the text's beginning, as a shown token is
    assert [marked.push([token_id]).text for token_id in (2, 0)] == ["\ud800", " a"]


SENTENCE_PIECE = """{
  "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
  "added_tokens": [{"id": 2, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false}],
  "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
  "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
  "model": {"type": "WordLevel", "vocab": {"▁a": 0, "b": 1, "<s>": 2}, "unk_token": "<s>"}
}"""
