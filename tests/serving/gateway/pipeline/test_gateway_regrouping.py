"""What a client is told does not depend on how a worker groups its tokens: text, calls, stop strings, ends.

The worker's outputs go through detokenizer, parser and OpenAI's response objects, as the gateway puts them together.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import event, example, given
from hypothesis import strategies as st

from moonshard.models.folder.generation import GenerationDefaults
from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.link_pb2 import SequenceOutput
from moonshard.serving.chat.thoughts import Start
from moonshard.serving.chat.tool_calls import NAMES
from moonshard.serving.gateway.openai.responses import ChatFormat, Chunks, Envelope, Whole
from moonshard.serving.gateway.pipeline.choice import ChoiceStream, Opening
from moonshard.serving.gateway.pipeline.model import ServedModel
from moonshard.serving.gateway.request import GenerationRequest, TokenPrompt, ToolUse
from tests.serving.gateway.conftest import FIXTURE
from tests.serving.gateway.sse import decoded

TOKENIZER = load_tokenizer(FIXTURE)
assert TOKENIZER is not None
MODEL = ServedModel(name="kimi", tokenizer=TOKENIZER, template=None, defaults=GenerationDefaults())
SPECIALS = TOKENIZER.special_tokens
END, MIDDLE = SPECIALS["<|im_end|>"], SPECIALS["<|im_middle|>"]
ONLY_THE_MODELS = 1_000_000  # an id that the tokenizer has not
SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = NAMES.values()
BYTE_TOKENS = {TOKENIZER.token_bytes(token): token for token in range(256)}
ENVELOPE = Envelope(id="x", model="kimi", fingerprint="", has_logprobs=True, has_token_ids=True)


def call(name: str = "get_weather", index: int = 0, arguments: str = '{"city": "Oslo 🌧"}') -> str:
    return f"{CALL_BEGIN}functions.{name}:{index}{ARGUMENTS_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


@dataclass(frozen=True)
class Marked:
    """Text in which markers are special tokens, without its last tokens."""

    text: str
    num_cut: int = 0


Part = str | bytes | Marked | int  # plain text, bytes of one token each, or a token


def tokens_of(parts: Sequence[Part]) -> list[int]:
    """Not within a strategy: type checks in `moonshard.models` draw at random, which hypothesis refuses there."""
    assert TOKENIZER is not None
    found: list[int] = []
    for part in parts:
        match part:
            case str():
                found += TOKENIZER.encode(part)
            case bytes():
                found += [BYTE_TOKENS[bytes([byte])] for byte in part]
            case Marked(text, num_cut):
                tokens = TOKENIZER.encode(text, allow_special=True)
                found += tokens[: len(tokens) - num_cut]
            case int():
                found.append(part)
    return found


@dataclass(frozen=True)
class Asked:
    """Those parts of a request that change the answer's text."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    has_tools: bool = True
    max_calls: int | None = None
    start: Start | None = None

    def choice(self) -> ChoiceStream:
        functions = frozenset({"get_weather", "add-up"})
        request = GenerationRequest(
            request_id="x",
            received_ns=0,
            prompt=TokenPrompt([1]),
            stop=self.stop,
            min_tokens=self.min_tokens,
            skip_special_tokens=self.skip_special_tokens,
            tool_use=ToolUse(functions=functions, max_calls=self.max_calls) if self.has_tools else None,
        )
        return MODEL.choice(0, request, Opening(self.start))


@dataclass(frozen=True)
class Said:
    """All that a worker generates, ended by the end token or cut off at its last token."""

    parts: tuple[Part, ...]
    finish: pb.FinishReason

    def grouped(self, sizes: list[int]) -> list[SequenceOutput]:
        """Outputs of these sizes and one of the rest, which ends it."""
        groups: list[list[int]] = []
        rest = [*tokens_of(self.parts), END]
        for size in sizes:
            if size < len(rest):
                groups.append(rest[:size])
                rest = rest[size:]
        outputs = [SequenceOutput(token_ids=group, logprobs=logprobs_of(group)) for group in (*groups, rest)]
        outputs[-1].finish_reason = self.finish
        return outputs


def logprobs_of(tokens: list[int]) -> list[pb.PositionLogprobs]:
    return [pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=token, logprob=-0.5)) for token in tokens]


def told(asked: Asked, outputs: list[SequenceOutput]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole choice, and what the stream of the same events adds up to."""
    form = ChatFormat(TOKENIZER)
    choice, whole, chunks, stream = asked.choice(), Whole(ENVELOPE, form), Chunks(ENVELOPE, form), b""
    for tell in (whole.add, chunks.set_prompt):
        tell(pb.TokenIds(ids=[1]))
    for output in outputs:
        delta = choice.accept(output)
        if delta is None:
            continue
        if (made := choice.take_calls()) is not None:
            whole.add(made)
            stream += chunks.calls(made)
        stream += chunks.delta(delta)
        whole.add(delta)
    assert choice.is_ended
    assert choice.is_worker_done
    return json.loads(whole.body(pb.Summary()))["choices"][0], added_up(decoded(stream.decode().split("\n\n")[:-1]))


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's chunks put together as a client does, in the shape of a whole choice."""
    parts = [event["choices"][0] for event in events]
    message: dict[str, Any] = {"role": "assistant", "refusal": None}
    message["content"] = "".join(part["delta"].get("content") or "" for part in parts)
    if thought := "".join(part["delta"].get("reasoning_content") or "" for part in parts):
        message["reasoning_content"] = thought
    calls: list[dict[str, Any]] = []
    for piece in (piece for part in parts for piece in part["delta"].get("tool_calls", ())):
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": piece["type"], "function": piece["function"]})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    logprobs = [record for part in parts if part["logprobs"] for record in part["logprobs"]["content"]]
    return {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None},
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1]["stop_reason"],
        "token_ids": [token for part in parts for token in part.get("token_ids", ())],
    }


words = st.text("ab🙂é ", max_size=6) | st.text(max_size=4) | st.sampled_from(list(NAMES.values()))
halves = st.builds(lambda char, end: char.encode()[:end], st.sampled_from("🙂é你"), st.integers(1, 3))
single = st.sampled_from([*SPECIALS.values(), ONLY_THE_MODELS])
calls = st.builds(
    call,
    st.sampled_from([*["get_weather", "add-up"] * 9, "unknown"]),
    st.integers(0, 2),
    st.sampled_from([*['{"city": "Oslo 🌧"}', '{"a": {"b": "}"}}', "{}"] * 9, "[1]", '{"a": "é']),
)
sections = st.builds(
    lambda made, num_cut: Marked(section(*made), num_cut),
    st.lists(calls, min_size=1, max_size=3),
    st.sampled_from([*[0] * 9, 1, 5, 20]),
)
bits = st.lists(words | words.map(str.encode) | halves | single, max_size=4)
markers = st.lists(st.sampled_from([SPECIALS["<think>"], SPECIALS["</think>"]]), max_size=2)
saids = st.builds(
    lambda begin, thought, end, before, made, after, finish: Said(
        (*begin, *thought, *end, *before, *made, *after), finish
    ),
    markers,
    bits,
    markers,
    bits,
    st.lists(sections, max_size=1) | st.lists(sections, min_size=1, max_size=2),
    bits,
    st.sampled_from([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH]),
)
stops = st.text("ab🙂é", min_size=1, max_size=3) | st.sampled_from(["Oslo", "}", "\ufffd", "<|im", "functions", ":0{"])
askeds = st.builds(
    Asked,
    stop=st.just(()) | st.lists(stops, max_size=2).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3, 20]),
    skip_special_tokens=st.booleans(),
    has_tools=st.sampled_from([True, True, True, False]),
    max_calls=st.sampled_from([None, None, 1]),
    start=st.sampled_from([None, "inside", "before"]),
)
TWO_CALLS = Said(
    ("Let me see 🙂. ", Marked(section(call(), call("add-up", 1, "{}"))), "So be it."), pb.FINISH_REASON_STOP
)
TWO_SECTIONS = Said((Marked(section(call())), "And", Marked(section(call(index=1)))), pb.FINISH_REASON_LENGTH)
THOUGHT = Said(
    (SPECIALS["<think>"], "Oslo 🌧? ", SPECIALS["</think>"], "Let me", *TWO_CALLS.parts), pb.FINISH_REASON_STOP
)
HALF = Said(("🙂".encode()[:3], Marked(section(call())), b"\x99a", MIDDLE), pb.FINISH_REASON_LENGTH)


@given(asked=askeds, said=saids, sizes=st.lists(st.integers(0, 7), max_size=60))
@example(asked=Asked(), said=TWO_CALLS, sizes=[1] * 200)
@example(asked=Asked(), said=TWO_SECTIONS, sizes=[1] * 200)
@example(asked=Asked(stop=("t be", " be")), said=TWO_CALLS, sizes=[1] * 200)
@example(asked=Asked(stop=("Oslo",)), said=TWO_CALLS, sizes=[1] * 200)
@example(asked=Asked(stop=("}",), min_tokens=60), said=TWO_CALLS, sizes=[2, 0, 5] * 30)
@example(asked=Asked(skip_special_tokens=False, has_tools=False), said=TWO_CALLS, sizes=[3] * 60)
@example(asked=Asked(skip_special_tokens=False), said=HALF, sizes=[1] * 100)
@example(asked=Asked(stop=("\ufffda",)), said=HALF, sizes=[1] * 100)
@example(asked=Asked(start="inside"), said=THOUGHT, sizes=[1] * 200)
@example(asked=Asked(start="before", has_tools=False), said=THOUGHT, sizes=[1] * 200)
@example(asked=Asked(start="inside", stop=("o 🌧",)), said=THOUGHT, sizes=[2] * 200)
@example(asked=Asked(start="inside", skip_special_tokens=False), said=TWO_CALLS, sizes=[1] * 200)
def test_however_tokens_are_grouped_message_and_deltas_are_those_of_one_piece(
    asked: Asked, said: Said, sizes: list[int]
):
    whole, streamed = told(asked, said.grouped([]))
    event(f"calls: {len(whole['message'].get('tool_calls', ()))}, ends: {whole['finish_reason']}")
    assert streamed == whole
    assert told(asked, said.grouped(sizes)) == (whole, whole)


def test_the_examples_are_what_they_seem():
    """One piece is right, so what equals it is."""
    whole, _ = told(Asked(), TWO_CALLS.grouped([]))
    assert whole["message"]["content"] == "Let me see 🙂. So be it."
    assert [made["id"] for made in whole["message"]["tool_calls"]] == ["functions.get_weather:0", "functions.add-up:1"]
    assert whole["finish_reason"] == "tool_calls"
    whole, _ = told(Asked(stop=("Oslo",)), TWO_CALLS.grouped([]))
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "Oslo")
    whole, _ = told(Asked(max_calls=1), TWO_CALLS.grouped([]))
    assert len(whole["message"]["tool_calls"]) == 1
    whole, _ = told(Asked(skip_special_tokens=False), HALF.grouped([]))
    assert whole["message"]["content"] == "\ufffd\ufffda<|im_middle|><|im_end|>"
    assert len(whole["message"]["tool_calls"]) == 1
    assert whole["finish_reason"] == "length"
    for start in ("inside", "before"):
        whole, _ = told(Asked(start=start), THOUGHT.grouped([]))
        message = whole["message"]
        assert (message["reasoning_content"], message["content"]) == ("Oslo 🌧? ", "Let meLet me see 🙂. So be it.")
        assert len(message["tool_calls"]) == 2
    whole, _ = told(Asked(start="inside"), TWO_CALLS.grouped([]))  # calls end a thought
    assert whole["message"]["reasoning_content"] == "Let me see 🙂. "
    assert (whole["message"]["content"], len(whole["message"]["tool_calls"])) == ("So be it.", 2)
