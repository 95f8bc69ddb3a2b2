"""History in the forms of Kimi's templates: what a next prompt shares with what was computed, by each one's rule.

The templates of `fixtures/templates` write what the public ones do, for text.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.chat.template import ChatTemplate

FIXTURES = Path(__file__).parents[2] / "fixtures"
TEMPLATES = {path.stem: ChatTemplate(path.read_text(), {}) for path in (FIXTURES / "templates").glob("*.jinja")}
words = st.text("ab é\n🙂", max_size=6)
loud = st.lists(st.sampled_from(["<think>", "</think>", "<|im_end|>", "<|tool_calls_section_begin|>", "a"])).map(
    "".join
)


def _tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(FIXTURES / "kimi_k2")
    assert tokenizer is not None
    return tokenizer


TOKENIZER = _tokenizer()
SPECIALS = TOKENIZER.special_tokens
BEGIN, END, USER = SPECIALS["<think>"], SPECIALS["</think>"], SPECIALS["<|im_user|>"]


def prompt_of(name: str, messages: list[dict[str, Any]], **kwargs: object) -> list[int]:
    return TEMPLATES[name].encode_chat(TOKENIZER, messages, template_kwargs=kwargs)


def special(*names: str) -> list[int]:
    return [SPECIALS[name] for name in names]


def call_of(index: int, arguments: str) -> dict[str, Any]:
    return {"id": f"functions.f:{index}", "type": "function", "function": {"name": "f", "arguments": arguments}}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Exchanges of a question, rounds of one call, and an answer; thoughts before each turn."""
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(words)})
        for _ in range(draw(st.integers(0, 2))):
            call = call_of(len(messages), draw(words))
            messages.append(
                {"role": "assistant", "content": None, "reasoning_content": draw(words), "tool_calls": [call]}
            )
            messages.append({"role": "tool", "content": draw(words), "tool_call_id": call["id"]})
        messages.append({"role": "assistant", "content": draw(words), "reasoning_content": draw(words)})
    return [*messages, {"role": "user", "content": draw(words)}]


def generated(turn: dict[str, Any], *, is_thinking: bool) -> list[int]:
    """What a model that was prompted into a thought, or behind one, generates for this turn."""
    thought = [*TOKENIZER.encode(turn["reasoning_content"]), END] if is_thinking else []
    said = [*thought, *TOKENIZER.encode(turn["content"] or "")]
    for call in turn.get("tool_calls", ()):
        said += special("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
        said += [*TOKENIZER.encode(call["id"]), *special("<|tool_call_argument_begin|>")]
        said += [*TOKENIZER.encode(call["function"]["arguments"]), *special("<|tool_call_end|>")]
        said += special("<|tool_calls_section_end|>")
    return [*said, *special("<|im_end|>")]


def turns_of(messages: list[dict[str, Any]]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def next_prompt(name: str, messages: list[dict[str, Any]], turn: int, **kwargs: object) -> list[int]:
    """The prompt of the request after this turn's."""
    later = next((index for index in turns_of(messages) if index > turn), len(messages))
    return prompt_of(name, messages[:later], **kwargs)


def num_shared(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


KEEPING: list[tuple[str, dict[str, object]]] = [
    ("kimi_k26", {"preserve_thinking": True}),
    ("kimi_k25", {"thinking": False}),
    ("kimi_k26", {"thinking": False}),
]


@pytest.mark.parametrize(("name", "kwargs"), KEEPING)
@given(messages=conversations())
def test_where_thoughts_are_kept_or_there_are_none_a_turn_and_its_prompt_begin_the_next_prompt(
    name: str, kwargs: dict[str, object], messages: list[dict[str, Any]]
):
    for turn in turns_of(messages):
        prompt = prompt_of(name, messages[:turn], **kwargs)
        computed = prompt + generated(messages[turn], is_thinking="thinking" not in kwargs)
        assert next_prompt(name, messages, turn, **kwargs)[: len(computed)] == computed


@pytest.mark.parametrize("name", ["kimi_k25", "kimi_k26"])
@given(messages=conversations())
def test_where_thoughts_are_dropped_the_next_prompt_shares_all_up_to_the_first_thought_of_the_last_exchange(
    name: str, messages: list[dict[str, Any]]
):
    """In a loop of calls all is shared: the thoughts since the last answer are kept."""
    for turn in turns_of(messages):
        prompt = prompt_of(name, messages[:turn])
        computed = prompt + generated(messages[turn], is_thinking=True)
        following = next_prompt(name, messages, turn)
        if messages[turn].get("tool_calls"):
            assert following[: len(computed)] == computed
            continue
        question = max(index for index, message in enumerate(messages[:turn]) if message["role"] == "user")
        exchange = [message for message in messages[question : turn + 1] if message["role"] == "assistant"]
        before = prompt_of(name, messages[: question + 1])  # ends with the <think> of the exchange's first turn
        first = next((i for i, each in enumerate(exchange) if each["reasoning_content"]), None)
        if first is None:
            assert following[: len(computed)] == computed
        elif first == 0:
            assert num_shared(computed, following) == len(before)
        else:
            assert num_shared(computed, following) >= len(before)
        assert following.count(BEGIN) == following.count(END) + 1


@pytest.mark.parametrize(
    ("name", "kwargs", "end"),
    [
        ("kimi_k2", {}, []),
        ("kimi_k2_thinking", {}, []),
        ("kimi_k25", {}, ["<think>"]),
        ("kimi_k25", {"thinking": True}, ["<think>"]),
        ("kimi_k25", {"thinking": False}, ["<think>", "</think>"]),
        ("kimi_k26", {}, ["<think>"]),
        ("kimi_k26", {"thinking": False}, ["<think>", "</think>"]),
    ],
)
def test_a_prompt_ends_where_the_answer_begins(name: str, kwargs: dict[str, object], end: list[str]):
    head = [*special("<|im_assistant|>"), *TOKENIZER.encode("assistant"), *special("<|im_middle|>", *end)]
    assert prompt_of(name, [{"role": "user", "content": "hi"}], **kwargs)[-len(head) :] == head


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=loud, thought=loud, result=loud)
def test_no_text_of_a_conversation_makes_a_special_token(name: str, content: str, thought: str, result: str):
    assume(content or thought or result)

    def told(content: str, thought: str, result: str) -> list[dict[str, Any]]:
        call = call_of(0, "{}")
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": call["id"]},
        ]

    specials = set(SPECIALS.values())
    found, plain = (
        [token for token in prompt_of(name, messages) if token in specials]
        for messages in (told(content, thought, result), told("a", "a", "a"))
    )
    assert found == plain
