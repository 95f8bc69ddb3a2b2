"""Before `apart` is timed: one engine and two give the same tokens.

Two questions, since sums in bfloat16 depend on the shape of the step that they are made in, and a token may be another
where two all but tie. The recorded model, in float32 and far from any tie, is asked with many requests at once, so that
slots and blocks change hands; there is a right answer to compare with. The slice, in bfloat16 at full width, is asked
one request at a time: the same chunks and the same rows then meet the same programs, and every bit is the same, unless
KV was lost on its way. Under load its tokens are compared and told, and may differ.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np

from moonshard.experiments.bench.gpu.checks import Check
from moonshard.experiments.bench.gpu.serving.apart import APART, Apart, Together
from moonshard.experiments.bench.gpu.serving.clients import Build, serve, serve_alone
from moonshard.experiments.bench.gpu.serving.engines import EnginePair, EngineSizes, build_pair, ignore
from moonshard.experiments.bench.gpu.serving.mix import Mix, arms, draw_requests, num_alike
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.registry import open_model
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape

MODEL, NUM_PROMPTS = "kimi_k2", 3
COPIES = 4  # of each recorded prompt
NUM_PREFILL_BLOCKS = 7  # 5 hold the longest prompt, 8 all three: each is soon written again, for another prompt
RECORDED_SIZES = EngineSizes(
    block_size=16,
    q_tile=16,
    prefill_buckets=(16, 32),
    chunk_tokens=(32,),
    decode_buckets=(4,),
    num_blocks=64,
    max_context_tokens=96,
)
OF_EACH_KIND = 2  # requests that the slice is asked


def recorded_pair(fixtures: Path, backend: moe.Backend) -> EnginePair:
    """The recorded model in float32, compiled."""
    checkpoint, model = open_model(fixtures / MODEL)
    loaded = weights.load(model.declare(), checkpoint, "float32", build_mesh(MeshShape()))
    return build_pair(model, loaded, RECORDED_SIZES, backend, "float32")


def check_recorded(fixtures: Path, pair: EnginePair) -> Iterator[Check]:
    """Asks all recorded prompts at once, of one engine and of two: counts answers that differ from the record."""
    asked, chunk = _recorded(fixtures / MODEL / "ref.npz"), pair.sizes.chunk_tokens[-1]
    builds: dict[str, Build] = {
        "one engine": lambda hear: Together(pair, chunk, hear, ignore),
        "two engines": lambda hear: Apart(pair, chunk, hear, ignore, num_prefill_blocks=NUM_PREFILL_BLOCKS),
    }
    for name, build in builds.items():
        yield Check(name=f"{MODEL}, {name}: wrong answers", error=_num_wrong(build, asked), tolerance=0)


def check_alone(pair: EnginePair, mix: Mix, seed: int) -> Check:
    """Asks requests of the slice one by one: counts those whose tokens differ between one engine and two."""
    few = replace(mix, num_requests=(OF_EACH_KIND,) * len(mix.num_requests))
    requests = draw_requests(few, pair.vocab_size, Random(f"{seed} alone"))
    built = arms(pair)
    both = built[f"both, chunks of {pair.sizes.chunk_tokens[-1]}"](ignore)
    one, two = (asyncio.run(serve_alone(build, requests)) for build in (both, built[APART](ignore)))
    name = "the slice alone, requests whose tokens differ between one engine and two"
    return Check(name=name, error=len(requests) - num_alike(one, two), tolerance=0)


def _recorded(path: Path) -> list[tuple[Request, list[int]]]:
    """Recorded requests with their answers; copies of one prompt are spread far apart."""
    with np.load(path) as recorded:
        known = [(recorded[f"ids{index}"], recorded[f"greedy{index}"]) for index in range(NUM_PROMPTS)]
    return [
        (_request(bytes([copy, index] * 8), prompt.tolist(), len(answer)), answer.tolist())
        for copy in range(COPIES)
        for index, (prompt, answer) in enumerate(known)
    ]


def _request(request_id: bytes, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(id=request_id, prompt=tuple(prompt), sampling=Sampling(temperature=0.0), max_tokens=max_tokens)


def _num_wrong(build: Build, asked: Sequence[tuple[Request, list[int]]]) -> int:
    heard = asyncio.run(serve(build, [(0.0, request) for request, _ in asked]))
    return sum(one.tokens != answer for one, (_, answer) in zip(heard, asked, strict=True))
