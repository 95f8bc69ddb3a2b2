"""Blocks are told one after another, each from its beginning to its end, and none of what was generated is lost."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.types import ToolCallPart
from moonshard.serving.gateway.blocks import Blocks, Change
from moonshard.serving.gateway.pipeline.choice import CallsMade

type Step = tuple[str, str, list[str]]  # what was thought, what was said, and parts of calls

TEXTS = st.sampled_from(["", "a", "b "])
STEPS = st.lists(st.tuples(TEXTS, TEXTS, st.lists(st.sampled_from(["begin", "{", "}"]), max_size=3)), max_size=8)


def parts_of(steps: list[Step]) -> list[tuple[ToolCallPart, ...]]:
    """What a parser makes of it: a call goes on until something else comes."""
    number, is_open = 0, False
    made: list[tuple[ToolCallPart, ...]] = []
    for thought, text, told in steps:
        is_open = is_open and not thought
        parts: list[ToolCallPart] = []
        for what in told:
            if what == "begin":
                number, is_open = number + 1, True
                parts.append(ToolCallPart(index=number - 1, id=f"call {number}", name="f"))
            elif is_open:
                parts.append(ToolCallPart(index=number - 1, arguments=what))
        is_open = is_open and ("begin" in told or not text)
        made.append(tuple(parts))
    return made


def events_of(steps: list[Step]) -> list[CallsMade | pb.Delta]:
    """What the pipeline gives of it, from its first token to its last."""
    events: list[CallsMade | pb.Delta] = []
    for (thought, text, _), made in zip(steps, parts_of(steps), strict=True):
        events += [CallsMade(0, made)] if made else []
        events.append(pb.Delta(reasoning=thought, text=text))
    return [*events, pb.Delta(finish_reason=pb.FINISH_REASON_STOP)]


def changes_of(blocks: Blocks, steps: list[Step]) -> list[Change]:
    changes: list[Change] = []
    for event in events_of(steps):
        if isinstance(event, CallsMade):
            blocks.calls(event)
        else:
            changes += blocks.delta(event)
    return [*changes, *blocks.finish()]


@given(STEPS)
def test_each_block_begins_goes_on_and_ends_before_the_next(steps: list[Step]):
    blocks = Blocks()
    changes = changes_of(blocks, steps)
    steps_told = [(change.step, change.block.index) for change in changes if change.step != "more"]
    assert steps_told == [(step, block.index) for block in blocks.all for step in ("begun", "ended")]
    open_block = None
    for change in changes:
        match change.step:
            case "begun":
                open_block = change.block
            case "more":
                assert change.block is open_block
            case "ended":
                assert change.block is open_block
                open_block = None
    for block in blocks.all:
        assert block.text == "".join(change.piece for change in changes if change.block is block)


@given(STEPS)
def test_nothing_that_was_generated_is_lost(steps: list[Step]):
    blocks = Blocks()
    changes_of(blocks, steps)
    message = blocks.message()
    assert (message.content or "") == "".join(text for _, text, _ in steps)
    assert (message.reasoning_content or "") == "".join(thought for thought, *_ in steps)
    parts = [part for made in parts_of(steps) for part in made]
    made = [(call.id, call.function.arguments) for call in message.tool_calls or ()]
    ids = [part.id for part in parts if part.id]
    assert made == [
        (call_id, "".join(part.arguments for part in parts if part.index == index)) for index, call_id in enumerate(ids)
    ]
