"""Which rows of a prefill are scored, and the scores on their way from steps to the output that takes them along.

The program between the two is `program`'s.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from moonshard.serving.control.plan import PrefillChunk, PrefillPlan
from moonshard.serving.control.request import MAX_LOGPROBS, PromptLogprobs, Request
from moonshard.serving.engine.steps import Step

# ---- what a step says


def scored_places(
    plan: PrefillPlan, bucket: int, num_rows: Callable[[PrefillChunk], int], q_tile: int
) -> list[tuple[PrefillChunk, slice]]:
    """The chunks that are scored, and where the tokens of each are among those of all partitions."""
    found, next_row = list[tuple[PrefillChunk, slice]](), defaultdict[int, int](int)
    for chunk in plan.chunks:
        partition = chunk.slot.partition
        start = partition * bucket + next_row[partition] * q_tile
        next_row[partition] += num_rows(chunk)
        if chunk.is_scored:
            found.append((chunk, slice(start, start + len(chunk.tokens))))
    return found


def write_tiles(fields: Mapping[str, np.ndarray], places: Sequence[slice], tile: int) -> None:
    """Names the tiles that have any of these places. A partition with fewer than another scores its first again."""
    num_partitions, bucket = fields["targets"].shape
    wanted = [set[int]() for _ in range(num_partitions)]
    for place in places:
        partition, start = divmod(place.start, bucket)
        wanted[partition].update(range(start // tile, -(-(start + place.stop - place.start) // tile)))
    for partition, tiles in enumerate(wanted):
        fields["tiles"][partition, : len(tiles)] = sorted(tiles)
    fields["num_tiles"][...] = max(map(len, wanted))


# ---- what comes back


def scored_rows(step: Step, packed: jax.Array) -> np.ndarray:
    """The packed scores of the scored chunks' tokens, chunk after chunk."""
    found = np.asarray(packed)
    return np.concatenate([found[place] for place in step.scored])


class PromptScores:
    """The scores of prompts under way, until the first output of their request's first choice takes them along."""

    def __init__(self) -> None:
        self._parts: dict[bytes, dict[int, np.ndarray]] = {}  # by request, then by where a chunk begins

    def __len__(self) -> int:
        return len(self._parts)

    def begin(self, request: Request) -> None:
        """Of a request that is to be prefilled here. Scores of no other are kept: it may have ended meanwhile."""
        if request.num_prompt_logprobs is not None:
            self._parts[request.id] = {}

    def take(self, plan: PrefillPlan, scores: np.ndarray) -> None:
        """What `scored_rows` gave of a plan's step. A prompt that is prefilled again has the same once more."""
        chunks = [chunk for chunk in plan.chunks if chunk.is_scored]
        ends = list(itertools.accumulate(len(chunk.tokens) for chunk in chunks))
        for chunk, part in zip(chunks, np.split(scores, ends[:-1]), strict=True):
            if (parts := self._parts.get(chunk.request.id)) is not None:
                parts[chunk.start] = part

    def forget(self, request_id: bytes) -> None:
        self._parts.pop(request_id, None)

    def pop(self, request: Request) -> PromptLogprobs | None:
        """The log-probabilities of the whole prompt, as many as it asks for; None where they are not wanted."""
        parts = self._parts.pop(request.id, None)
        if parts is None or request.num_prompt_logprobs is None:
            return None
        packed = np.concatenate([parts[start] for start in sorted(parts)])[: len(request.prompt) - 1]
        floats, top = packed.view(np.float32), request.num_prompt_logprobs
        return PromptLogprobs(
            logprobs=tuple(floats[:, 1].tolist()),
            ranks=tuple(packed[:, 0].tolist()),
            top_ids=tuple(packed[:, 2 : 2 + top].reshape(-1).tolist()),
            top_logprobs=tuple(floats[:, 2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + top].reshape(-1).tolist()),
        )
