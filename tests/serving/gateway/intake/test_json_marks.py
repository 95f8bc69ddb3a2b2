"""Scanning a JSON body finds what a parser finds, however the body is cut into pieces."""

import json
import random
import tracemalloc

import pytest

from moonshard.serving.gateway.intake import json_marks
from moonshard.serving.gateway.intake.json_marks import Contents, contents_of


def plainly(body: bytes) -> Contents:
    """What is in the body, character by character, as a parser would read it."""
    counts, level, highest = dict.fromkeys("{[:,", 0), 0, 0
    in_string = is_escaped = False
    for char in body.decode():
        if is_escaped:
            is_escaped = False
        elif in_string:
            is_escaped, in_string = char == "\\", char != '"'
        else:
            in_string = char == '"'
            level += (char in "{[") - (char in "}]")
            highest = max(highest, level)
            if char in counts:
                counts[char] += 1
    return Contents(counts["{"], counts["["], counts[":"], counts[","], highest)


def any_value(draw: random.Random, depth: int = 0) -> object:
    kind = draw.randrange(6 if depth < 5 else 3)
    if kind == 0:
        return draw.choice([None, 1, 2.5])
    if kind <= 2:
        return "".join(draw.choices(['"', "\\", ",", "[", "{", "]", ":", "a", "\u00e9"], k=draw.randrange(9)))
    values = [any_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return values if kind <= 4 else {f"{number}\\": value for number, value in enumerate(values)}


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_marks_are_found_outside_of_strings_however_a_body_is_cut(cut: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_marks, "PIECE_BYTES", cut)
    monkeypatch.setattr(json_marks, "FEW_BYTES", -1)
    draw = random.Random(0)
    for _ in range(200):
        body = json.dumps([any_value(draw) for _ in range(4)], ensure_ascii=False).encode()
        assert contents_of(body) == plainly(body)


def test_few_marks_are_counted_anywhere_and_many_where_they_mean_something():
    message = {"role": "user", "content": "a, {b}, [c]"}
    few = json.dumps({"messages": [message]}).encode()
    assert contents_of(few) == Contents(3, 2, 3, 3, 5)
    many = json.dumps({"messages": [message] * 1_000}).encode()
    assert contents_of(many) == Contents(1_001, 1, 2_001, 1_999, 3)
    assert contents_of(json.dumps({"prompt": [7] * 100_000}).encode()) == Contents(1, 1, 1, 99_999, 2)


def test_counting_ends_once_there_are_too_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_marks, "PIECE_BYTES", 100)
    ids = json.dumps([7] * 100_000).encode()
    assert 1_000 < contents_of(ids, enough=1_000).num_in_all < 1_200


def test_what_is_made_of_a_body_takes_no_more_than_is_reckoned():
    """By Python's own count, of what is smallest for its size."""

    for body in (
        b"[" + b"[]," * 50_000 + b"[]]",
        b"[" + b"1000," * 50_000 + b"1]",
        b'[{"a":""}' + b',{"a":""}' * 9_999 + b"]",
    ):
        tracemalloc.start()
        decoded = json.loads(body)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held <= 4 * (len(body) + contents_of(body).num_bytes)
        del decoded
