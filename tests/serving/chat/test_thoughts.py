"""Thoughts: told from the rest by markers alone, in every split; the prompt's last special says where answers begin."""

from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.chat.thoughts import THOUGHT_BEGIN, THOUGHT_END, Start, ThoughtParser, answer_start
from moonshard.serving.chat.tool_calls import CALL_BEGIN, SECTION_BEGIN, spelt

BEGIN, END, SECTION, OTHER = 1, 2, 3, 4  # token ids
MARKS = {BEGIN: THOUGHT_BEGIN, END: THOUGHT_END, SECTION: SECTION_BEGIN}
TEXTS = {OTHER: "a", 5: " ", 6: "\n", 7: "é"} | MARKS
starts = st.sampled_from(["inside", "before"])


def parsed(start: Start, steps: Sequence[Sequence[int]], **how: Sequence[str]) -> tuple[str, str, int]:
    """Thought, rest and number of thought tokens."""
    parser = ThoughtParser(start, MARKS, **how)
    pieces = [parser.push(step, "".join(TEXTS[token] for token in step)) for step in steps]
    rest = "".join(rest for _, rest in pieces) + parser.finish()
    return "".join(thought for thought, _ in pieces), rest, parser.num_tokens


@pytest.mark.parametrize(
    ("start", "tokens", "thought", "rest", "num_tokens"),
    [
        ("inside", [OTHER, 5, END, 5, OTHER], "a ", " a", 2),
        ("inside", [BEGIN, BEGIN, OTHER, END, OTHER], "a", "a", 1),
        ("inside", [OTHER, SECTION, OTHER], "a", SECTION_BEGIN + "a", 1),
        ("inside", [END, OTHER], "", "a", 0),
        ("inside", [OTHER, OTHER], "aa", "", 2),
        ("inside", [OTHER, END, OTHER, END, BEGIN], "a", "a</think><think>", 1),
        ("before", [6, BEGIN, OTHER, END, 6, OTHER], "a", "\na", 1),
        ("before", [5, OTHER, BEGIN, OTHER, END], "", " a<think>a</think>", 0),
        ("before", [5, 5], "", "  ", 0),
        ("before", [SECTION, OTHER], "", SECTION_BEGIN + "a", 0),
        ("before", [END, OTHER], "", "</think>a", 0),
    ],
)
def test_a_thought_ends_at_its_marker_or_where_calls_begin(
    start: Start, tokens: list[int], thought: str, rest: str, num_tokens: int
):
    assert parsed(start, [tokens], left=[SECTION_BEGIN]) == (thought, rest, num_tokens)
    assert parsed(start, [tokens]) == (thought, spelt(rest), num_tokens)


@given(start=starts, tokens=st.lists(st.sampled_from(list(TEXTS)), max_size=9), cuts=st.sets(st.integers(1, 8)))
def test_however_the_text_is_cut_it_is_the_same_thought(start: Start, tokens: list[int], cuts: set[int]):
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    steps = [tokens[left:right] for left, right in pairwise(edges)]
    whole = parsed(start, [tokens], left=[SECTION_BEGIN])
    assert parsed(start, steps, left=[SECTION_BEGIN]) == whole
    assert parsed(start, [[token] for token in tokens], left=[SECTION_BEGIN]) == whole


@given(start=starts, tokens=st.lists(st.sampled_from(list(TEXTS)), max_size=9))
def test_no_text_is_lost_and_no_mark_is_left(start: Start, tokens: list[int]):
    thought, rest, _ = parsed(start, [tokens], hidden=list(MARKS.values()))
    blank = list(takewhile(lambda token: not TEXTS[token].strip(), tokens))
    if start == "before" and tokens[len(blank) :][:1] == [BEGIN]:  # white space before a thought is no text
        tokens = tokens[len(blank) :]
    assert thought + rest == "".join(TEXTS[token] for token in tokens if token not in MARKS)


def test_markers_of_calls_within_a_thought_are_spelt_out():
    parser = ThoughtParser("inside", MARKS, left=[SECTION_BEGIN, CALL_BEGIN])
    assert parser.push([OTHER], f"a{CALL_BEGIN}b") == ("a<|tool_call_begin|>b", "")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(Path(__file__).parents[2] / "fixtures" / "kimi_k2")
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_assistant|>assistant<|im_middle|><think>", "inside"),
        ("<|im_assistant|>assistant\n<think>\n", "inside"),
        ("<|im_assistant|>assistant<|im_middle|><think></think>", None),
        ("<think>x</think>y<|im_end|><|im_assistant|>assistant<|im_middle|>", "before"),
        ("no special token", "before"),
        ("", "before"),
    ],
)
def test_where_an_answer_begins_is_said_by_the_prompts_last_special_token(
    tokenizer: Tokenizer, prompt: str, start: Start | None
):
    assert answer_start(tokenizer.encode(prompt, allow_special=True), tokenizer.special_tokens) == start


def test_a_marker_that_a_client_spells_begins_no_thought(tokenizer: Tokenizer):
    prompt = [*tokenizer.encode("<|im_middle|>", allow_special=True), *tokenizer.encode("<think>")]
    assert answer_start(prompt, tokenizer.special_tokens) == "before"
