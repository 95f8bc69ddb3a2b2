"""The sizes that tests with programs have in common, so that what one compiles the others find.

They serve in this process (`engine_room`), in a pair of workers (`serving.pd.pd_pair`), in clusters of real processes
and in servers that experiments start: a program is found again where its sizes are the same, whoever compiled it.
"""

from collections.abc import Mapping

BLOCK_SIZE = 16
NUM_BLOCKS = 128
NUM_SLOTS = 4
CHUNK_TOKENS = 64
MAX_CONTEXT_TOKENS = 2000
SETTINGS: Mapping[str, object] = {
    "model.max_context_tokens": MAX_CONTEXT_TOKENS,
    "prefill.chunk_tokens": CHUNK_TOKENS,
    "prefill.max_slots": NUM_SLOTS,
    "decode.max_slots": NUM_SLOTS,
    "kv.block_size": BLOCK_SIZE,
    "kv.num_blocks": NUM_BLOCKS,
}
EXPERIMENT = "\n".join(f"{key} = {value}" for key, value in SETTINGS.items())  # lines of a `[server]`
IN_EXPERIMENT = tuple(f"server.{key}={value}" for key, value in SETTINGS.items())  # as `--set` has them
