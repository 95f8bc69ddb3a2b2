"""`moonshard convert`."""

import sys
import time
from pathlib import Path
from typing import Literal

from moonshard.serving.deploy.startup import prepare_jax
from moonshard.sharding.shape import MeshShape

TELLS_EVERY_S = 5.0
GIB = 2**30


def convert(model: Path, to: Literal["bf16", "int4", "fp8", "int8"], out: Path) -> int:
    """Write a checkpoint's folder anew with its weights in another number format.

    Tokenizer, template and settings are copied. Memory is that of the largest matrix before and after, and of some rows
    between them; files have at most 5 GiB. A folder whose writing was cut short does not open.

    Args:
        model: the checkpoint's folder.
        to: bf16: every matrix in bfloat16, exactly where that has its values; int4: routed experts in groups of 32, as
            Kimi K2.5 has them; fp8: every matrix but embeddings, head and router by blocks of 128 x 128, as Kimi K2 and
            DeepSeek-V3 have them; int8: these matrices with a scale to each row.
        out: the folder to write, which must hold no model yet.
    """
    prepare_jax(MeshShape())
    from moonshard.models import weights
    from moonshard.models.folder.conversion import convert as write
    from moonshard.models.registry import open_model

    checkpoint, described = open_model(model)
    weights.check_shapes(described.declare(), checkpoint)  # better known before hours of writing than after them
    done = write(model, to, out, progress=_Progress())
    told = [f"{done.num_tensors} tensors, {done.num_bytes / GIB:.2f} GiB"]
    told += [f"{done.num_quantised} matrices quantised"] if done.num_quantised else []
    told += [f"{done.num_widened} made bfloat16"] if done.num_widened else []
    told += [f"of which {len(done.rounded)} had values that it rounds"] if done.rounded else []
    sys.stdout.write(f"{out}: {', '.join(told)}\n")
    return 0


class _Progress:
    """Tells on stderr how far it is, every few seconds."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told_s > TELLS_EVERY_S:
            self._told_s = time.monotonic()
            sys.stderr.write(f"{done} of {total} matrices and other tensors\n")
