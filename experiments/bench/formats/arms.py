"""The formats that are compared: a bfloat16 folder as it is, wider, and converted."""

from functools import partial
from pathlib import Path

from moonshard.experiments.bench.formats.record import Arm
from moonshard.experiments.common.made_once import made_once
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import Target, convert

CONVERTED: tuple[Target, ...] = ("int4", "fp8", "int8")


def arms_of(folder: Path, converted: Path) -> tuple[Arm, ...]:
    """Makes the folders in other formats, where they are not there yet, in one of this model's in `converted`.

    Raises what `convert` does, and OSError.
    """
    own = converted / Checkpoint.open(folder).fingerprint[:12]
    arms = [
        Arm(name="float32", folder=str(folder), holding="float32"),
        Arm(name="as stored", folder=str(folder), holding="native"),
    ]
    for name in CONVERTED:
        target = made_once(own / name, partial(convert, folder, name))
        arms.append(Arm(name=name, folder=str(target), holding="native"))
    return tuple(arms)
