"""A step comes out of the wire as it went in, and one that is changed, lost, doubled or out of turn is noticed."""

import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import link_pb2
from moonshard.serving.constrained.masks import ANY_TOKEN
from moonshard.serving.engine.steps import DrawMasks, Step, StepKind
from moonshard.serving.gang.steps import (
    AwaitedMasks,
    GangDiverged,
    Sealed,
    StepChain,
    ToldMasks,
    masks_message,
    step_from,
    step_message,
)

NUM_WORDS = 3
_numbers = st.integers(-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Masks(DrawMasks):
    words: np.ndarray

    def __call__(self) -> np.ndarray:
        return self.words

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        raise AssertionError("nothing is drawn here")


@st.composite
def steps(draw: st.DrawFn, num_partitions: int) -> Step:
    def rows(dtype: type = np.int32, num_rows: int = num_partitions, width: int | None = None) -> np.ndarray:
        width = width or draw(st.integers(1, 4))
        values = draw(st.lists(_numbers, min_size=num_rows * width, max_size=num_rows * width))
        return np.array(values, np.int64).astype(dtype).reshape(num_rows, width)

    def maybe() -> np.ndarray | None:
        return rows() if draw(st.booleans()) else None

    words = rows(np.uint32, 4, NUM_WORDS)
    words[draw(st.lists(st.booleans(), min_size=4, max_size=4))] = ANY_TOKEN
    masks = Masks(words) if draw(st.booleans()) else None
    return Step(
        number=draw(_numbers),
        kind=draw(st.sampled_from(StepKind)),
        bucket=draw(st.integers(0, 4096)),
        metadata=rows(),
        sampling=maybe(),
        allowed=masks,
        scoring=maybe(),
        guessing=maybe(),
        num_ahead=draw(st.integers(0, 3)),
        partition=draw(st.integers(0, num_partitions - 1)),
        num_blocks=draw(st.integers(0, 9)),
        ticket=draw(st.none() | st.integers(0, 2**62)),
    )


def as_told(step: Step) -> tuple[object, ...]:
    allowed = None if step.allowed is None else step.allowed()
    arrays = (step.metadata, step.sampling, step.scoring, step.guessing, allowed)
    shown = tuple(None if array is None else (array.dtype, array.tolist()) for array in arrays)
    return (step.number, step.kind, step.bucket, *shown, step.num_ahead, step.partition, step.num_blocks, step.ticket)


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), steps(n))))
def test_a_follower_launches_what_the_leader_launches(given_: tuple[int, Step]):
    num_partitions, step = given_
    encoded = step_message(step).SerializeToString()
    found = step_from(link_pb2.GangStep.FromString(encoded), num_partitions=num_partitions, num_words=NUM_WORDS)
    assert (found.allowed is None) == (step.allowed is None)
    if isinstance(found.allowed, AwaitedMasks) and step.allowed is not None:
        told: list[np.ndarray] = []
        ToldMasks(step.allowed, told.append)()
        found.allowed.put(link_pb2.GangMasks.FromString(masks_message(told[0]).SerializeToString()))
    assert as_told(found) == as_told(step)


def test_whoever_needs_masks_that_have_not_come_waits_for_them():
    masks, found = AwaitedMasks(NUM_WORDS), list[list[int]]()
    waiting = threading.Thread(target=lambda: found.append(masks().ravel().tolist()))
    waiting.start()
    waiting.join(0.05)
    assert not found
    masks.put(masks_message(np.arange(6, dtype=np.uint32).reshape(2, NUM_WORDS)))
    waiting.join(10)
    assert found == [[0, 1, 2, 3, 4, 5]]


def test_blocks_that_only_the_leader_has_cannot_be_landed():
    land = Step(0, StepKind.LAND, 1, np.zeros((1, 1), np.int32), payload=np.zeros((1, 1, 1, 1)))
    with pytest.raises(ValueError, match="by itself"):
        step_message(land)
    assert step_message(replace(land, ticket=0)).ticket == 0


def test_rows_that_may_draw_anything_are_not_told():
    words = np.full((256, NUM_WORDS), ANY_TOKEN, np.uint32)
    words[7, 1] = 0
    message = masks_message(words)
    assert list(message.rows) == [7]
    assert len(message.allowed) == 4 * NUM_WORDS
    masks = AwaitedMasks(NUM_WORDS)
    masks.put(message)
    assert masks().tolist() == words.tolist()


def sealed(num_steps: int) -> list[Sealed]:
    """Every second one with masks."""
    chain, found = StepChain(), list[Sealed]()
    for number in range(num_steps):
        step = link_pb2.GangStep(number=number, kind="decode", metadata=bytes([number]), is_masked=number % 2 == 1)
        masks = [link_pb2.GangMasks(allowed=bytes([number] * 4))] if step.is_masked else []
        for message in (step, *masks):
            chain.seal(message)
            found.append(message)
    return found


def follow(told: list[Sealed]) -> None:
    chain = StepChain()
    for message in told:
        chain.check(type(message).FromString(message.SerializeToString()))


def test_steps_and_masks_in_their_order_are_followed():
    follow(sealed(5))


@pytest.mark.parametrize("wrong", ["lost", "doubled", "swapped", "changed", "of another gang"])
@pytest.mark.parametrize("which", range(1, 6))
def test_a_member_that_was_told_otherwise_notices(wrong: str, which: int):
    told = sealed(5)
    match wrong:
        case "lost":
            del told[which]
        case "doubled":
            told.insert(which, told[which])
        case "swapped":
            told[which], told[which + 1] = told[which + 1], told[which]
        case "changed":
            changed = told[which]
            if isinstance(changed, link_pb2.GangMasks):
                changed.allowed += bytes(4)
            else:
                changed.bucket += 1
        case _:
            told[which].digest = b"x" * 16
    with pytest.raises(GangDiverged):
        follow(told)
