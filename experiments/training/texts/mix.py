"""`-m moonshard.experiments.training.texts.mix`: the weighted mean of two model folders' weights, into the second.

What goes on from a model forgets some of what it knew; the mean with what it began from keeps most of both. Source:
robust fine-tuning by weight-space ensembles (arXiv 2109.01903).
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from moonshard.experiments.training.texts.corpus import POCKET
from moonshard.models.folder.checkpoint import WEIGHTS, Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint

BEFORE_SHARE = 0.35  # of the embedded model: of 0, 0.35 and 0.5 the least that keeps recall in long documents


def mix(before: Path, after: Path, share: float) -> None:
    """Replaces the weights of `after` by `share` of those of `before` and the rest of its own, whole or not at all.

    CheckpointError for a folder that cannot be read, and where the two have not the same tensors.
    """
    old, new = Checkpoint.open(before), Checkpoint.open(after)
    if set(old.names) != set(new.names):
        raise CheckpointError(f"{before} and {after} have not the same tensors")
    for name in new.names:
        old.expect(name)
        new.expect(name)
    tensors = {name: _mean(old.tensor(name), new.tensor(name), share) for name in new.names}
    with tempfile.TemporaryDirectory(dir=after, prefix=".mix-") as written:
        write_checkpoint(written, new.config, tensors)
        os.replace(Path(written) / WEIGHTS, after / WEIGHTS)


def _mean(old: np.ndarray, new: np.ndarray, share: float) -> np.ndarray:
    """The mean, computed in float32, in the second one's type."""
    mean = share * old.astype(np.float32) + (1 - share) * new.astype(np.float32)
    return mean.astype(new.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moonshard.experiments.training.texts.mix", description=__doc__)
    parser.add_argument("model", type=Path, metavar="DIR", help="the folder whose weights are replaced")
    parser.add_argument("--before", type=Path, default=POCKET, metavar="DIR", help="default: the embedded model")
    parser.add_argument("--share", type=float, default=BEFORE_SHARE, help="of --before, 0 to 1; default: %(default)s")
    options = parser.parse_args()
    try:
        mix(options.before, options.model, options.share)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
