"""What is best computed at once, by the kind of machine: one table, measured, that everything else reads.

A kind is the kernels that a machine runs: those of `models.native` in one of their forms, by instruction set; those of
`models.gpu`; or none, where XLA compiles everything. `moonshard bench --only sizes` measures the candidates for each
entry again, on the machine at hand, and tells which was best and which stands here. Only speed depends on an entry, and
the last bits of results: sums over keys are added up in other parts. Tiles that fit registers and caches are constants
of an instruction set, beside the kernels (`native/csrc`).

Times in the table are of steps on the bench's checkpoint with Kimi K2's proportions, its weights as stored (bfloat16),
on two cores of an AMD EPYC (Zen 4), medians of candidates that took turns; AVX2 and SSE4 as forms of the kernels there,
while XLA's products beside them had AVX-512. vLLM (`EngineArgs.get_batch_defaults`) and SGLang (`ServerArgs`) have such
tables too, by a card's name and memory, and by whether a server or a batch job asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Sizes for one kind of machine. A worker's are `serving.engine.loading.model.machine_for`'s."""

    chunk_tokens: int  # of prompts in a step, where `prefill.chunk_tokens` is auto
    tile_tokens: int  # of one sequence in a row of a prefill step: a chunk is padded to whole rows
    few_tokens: int  # of the smallest prefill step of more than one token: a cached prefix leaves only the last ones
    expand_from: float  # from how many times as many queries on keys are expanded as counting operations would have it
    # The most rows that a kernel multiplies with a weight in place; for more XLA copies it, unless it is large
    # (`product.COPIED_VALUES`); 0: none.
    kernel_rows: int
    keys: int  # that XLA's absorbed attention reads at once
    expanded_keys: int  # that XLA's expanded attention makes at once
    expanded_queries: int  # positions that attend to them at once

    @property
    def reads_in_place(self) -> bool:
        """Whether weights stay in their stacks, and pages where they lie, for kernels to read."""
        return self.kernel_rows > 0


XLA = Machine(
    chunk_tokens=512,  # a prompt of 2,048 in chunks of 256: 1,862 ms, 512: 1,502, 1,024: 1,318; see avx512
    tile_tokens=32,  # see avx512
    few_tokens=8,  # 1 token behind 511 in a step of 1: 37 ms, 2: 31, 4: 32, 8: 37, 16: 37, 32: 46
    expand_from=1.0,  # 64, 128 and 256 tokens behind 1,024, together, at 0.5: 676 ms, 1: 652, 2: 775, 4: 833
    kernel_rows=0,
    keys=256,  # batch 1 and 8 behind 1,024, together, of 128: 87 ms, 256: 79, 512: 131
    expanded_keys=256,  # a prompt of 2,048 tokens with 128: 1,529 ms, 256: 1,488, 512: 1,520
    expanded_queries=256,  # with 64: 1,723 ms, 128: 1,532, 256: 1,464
)
AVX512 = Machine(
    # A prompt of 2,048 tokens in chunks of 256: 1,511 ms, 512: 1,246, 1,024: 1,036, with steps of up to 264, 376 and
    # 617 ms. The quickest is not the best: whoever decodes beside it waits for a step, and what a worker that only
    # prefills computed last is still to be moved. With chunks of 1,024 the first token of such a prompt came after
    # 1,295 ms instead of 1,461, but the second 163 ms behind it instead of 81.
    chunk_tokens=512,
    tile_tokens=32,  # 512 and 100 tokens, together, in rows of 16: 247 ms, 32: 249, 64: 252, 128: 247
    few_tokens=8,  # 1, 3, 6 and 12 tokens behind 511, together, from steps of 1 on: 38.4 ms, 4: 40.6, 8: 40.1
    expand_from=1.0,  # 64, 128 and 256 tokens behind 1,024, together, at 0.5: 400 ms, 1: 396, 2: 430, 4: 556
    # 128, 256 and 512 tokens, together, of up to 64 rows: 345 ms, 128: 342, 256: 346, 512: 361; with weights in float32
    # 357, 355, 351 and 360.
    kernel_rows=128,
    keys=XLA.keys,  # not used but with a context's blocks cut over devices
    expanded_keys=XLA.expanded_keys,  # not used
    expanded_queries=XLA.expanded_queries,
)
MACHINES: Mapping[str, Machine] = {
    "avx512": AVX512,
    # Chunks of 256: 1,776 ms, 512: 1,475, 1,024: 1,313 (steps of up to 325, 511 and 804 ms). Expanding at 0.5: 511 ms,
    # 1: 501, 2: 555, 4: 717. Kernels of up to 64 rows: 399 ms, 128: 416, 256: 418, 512: 435, the first three as good.
    "avx2": AVX512,
    # Chunks of 256: 3,945 ms, 512: 3,381, 1,024: 3,044. From steps of 4 on, 1, 3, 6 and 12 tokens behind 511 took
    # together 85 ms, 8: 93, 16: 117. Kernels are slower than products with AVX-512 here, of course.
    "sse4": replace(AVX512, few_tokens=4),
    "xla": XLA,
    # One H100, two layers of Kimi K2 under load (the bench's README): of chunks of 256, 512 and 1,024 the last had the
    # shortest waits for first tokens, and at the 90th percentile also between tokens. Nothing else was measured there;
    # `expanded_queries` is what it was when that was.
    "gpu": replace(XLA, chunk_tokens=1024, expanded_queries=128),
}
