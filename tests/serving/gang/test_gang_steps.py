"""A step comes out of the wire as it went in, and one that is changed, lost, doubled or out of turn is noticed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import link_pb2
from moonshard.serving.engine.steps import Step, StepKind
from moonshard.serving.gang.steps import GangDiverged, KnownMasks, StepChain, step_from, step_message

NUM_WORDS = 3
_numbers = st.integers(-(2**31), 2**31 - 1)


@st.composite
def steps(draw: st.DrawFn, num_partitions: int) -> Step:
    def rows(dtype: type = np.int32, num_rows: int = num_partitions, width: int | None = None) -> np.ndarray:
        width = width or draw(st.integers(1, 4))
        values = draw(st.lists(_numbers, min_size=num_rows * width, max_size=num_rows * width))
        return np.array(values, np.int64).astype(dtype).reshape(num_rows, width)

    def maybe() -> np.ndarray | None:
        return rows() if draw(st.booleans()) else None

    masks = KnownMasks(rows(np.uint32, 4, NUM_WORDS)) if draw(st.booleans()) else None
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
    assert as_told(found) == as_told(step)


def test_blocks_that_only_the_leader_has_cannot_be_landed():
    land = Step(0, StepKind.LAND, 1, np.zeros((1, 1), np.int32), payload=np.zeros((1, 1, 1, 1)))
    with pytest.raises(ValueError, match="by itself"):
        step_message(land)
    assert step_message(replace(land, ticket=0)).ticket == 0


def sealed(num_steps: int) -> list[bytes]:
    chain, found = StepChain(), []
    for number in range(num_steps):
        message = link_pb2.GangStep(number=number, kind="decode", metadata=bytes([number]))
        chain.seal(message)
        found.append(message.SerializeToString())
    return found


def follow(told: list[bytes]) -> None:
    chain = StepChain()
    for encoded in told:
        chain.check(link_pb2.GangStep.FromString(encoded))


def test_steps_in_their_order_are_followed():
    follow(sealed(5))


@pytest.mark.parametrize("wrong", ["lost", "doubled", "swapped", "changed", "of another gang"])
def test_a_member_that_was_told_otherwise_notices(wrong: str):
    told = sealed(5)
    if wrong == "lost":
        del told[2]
    elif wrong == "doubled":
        told.insert(2, told[2])
    elif wrong == "swapped":
        told[2], told[3] = told[3], told[2]
    elif wrong == "changed":
        changed = link_pb2.GangStep.FromString(told[2])
        changed.bucket += 1
        told[2] = changed.SerializeToString()
    else:
        told[3] = link_pb2.GangStep(sequence=3, number=3, kind="decode", digest=b"x" * 16).SerializeToString()
    with pytest.raises(GangDiverged):
        follow(told)
