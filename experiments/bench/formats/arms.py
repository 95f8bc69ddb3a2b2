"""The formats that are compared: a bfloat16 folder as it is, wider, and converted."""

from pathlib import Path

from moonshard.experiments.bench.formats.record import Arm
from moonshard.models.folder.conversion import Target, convert

CONVERTED: tuple[Target, ...] = ("int4", "fp8", "int8")


def arms_of(folder: Path, converted: Path) -> tuple[Arm, ...]:
    """Makes the converted folders in `converted`, where they are not there yet.

    Raises what `convert` does.
    """
    arms = [
        Arm(name="float32", folder=str(folder), holding="float32"),
        Arm(name="as stored", folder=str(folder), holding="native"),
    ]
    for name in CONVERTED:
        target = converted / name
        if not (target / "config.json").exists():
            convert(folder, name, target)
        arms.append(Arm(name=name, folder=str(target), holding="native"))
    return tuple(arms)
