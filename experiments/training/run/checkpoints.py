"""Checkpoints of a run: written whole or not at all, the last two kept, the last one that can be read found again.

Steps that are needed later are kept as well.

Orbax writes into a folder of another name and renames it when everything is there. A checkpoint has parts that can be
read alone, and leaves are stored by their path in a part, so that neither the order of fields nor the number of devices
matters. What a run was told to do is kept in `journal`; the model folder that people use is made in `training.export`.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, CustomSteps, LatestN

from moonshard.experiments.training.run.recipe import RunFailed

NUM_KEPT = 2
PARTIAL = ".orbax-checkpoint-tmp"  # in the name of a folder that is being written
SPARE_BYTES = 1 << 20  # what a checkpoint holds beside the values
REMOVAL_S, REMOVAL_PAUSE_S = 5.0, 0.05  # for removing what other threads still write into
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MALFORMED = (KeyError, TypeError, AttributeError)  # what orbax trips over in metadata that are JSON, but not its own
Parts = Mapping[str, Any]  # pytrees by name


class Checkpoints:
    """The checkpoints of one run's folder, by step."""

    def __init__(self, folder: Path, *, is_writer: bool = True, kept: Sequence[int] = ()):
        """The one writer removes what a killed run left half-written; a reader leaves a run's folder alone.

        `kept` are the steps that are not removed when later ones come.

        RunFailed where the folder cannot be made.
        """
        self._folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(NUM_KEPT), CustomSteps(kept)]),
            enable_async_checkpointing=False,
            create=is_writer,
        )
        if is_writer:
            self._remove_partial()
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except OSError as error:
            raise RunFailed(f"{self._folder}: {_cause(error)}") from error

    def newest(self) -> int | None:
        """The last step whose checkpoint is complete."""
        return self._manager.latest_step()

    def has(self, step: int) -> bool:
        return step in self._manager.all_steps()

    def save(self, step: int, parts: Parts) -> None:
        """Nothing happens if the step is there already. RunFailed if it cannot be written; older ones stay whole."""
        if self.has(step):
            return
        leaves = {name: _by_path(jax.device_get(part)) for name, part in parts.items()}
        saved = {name: ocp.args.StandardSave(part) for name, part in leaves.items()}
        try:
            self._check_room(sum(leaf.nbytes for part in leaves.values() for leaf in part.values()))
            self._manager.save(step, args=ocp.args.Composite(**saved), force=True)
        except (OSError, ValueError) as error:
            self._remove_partial()
            raise RunFailed(f"{self._folder}: step {step} could not be saved: {_cause(error)}") from error

    def restore(self, step: int, like: Parts) -> dict[str, Any]:
        """The parts of a step that `like` names, in its shapes, as numpy arrays. RunFailed if they cannot be read."""
        wanted = {name: ocp.args.StandardRestore(_by_path(_zeros(part))) for name, part in like.items()}
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**wanted))
        except (OSError, ValueError, *MALFORMED) as error:
            raise RunFailed(f"{self._folder}: step {step} cannot be read: {_cause(error)}") from error
        return {name: _from_paths(part, found[name]) for name, part in like.items()}

    def restore_newest(self, like: Parts, say: Callable[[str], None]) -> dict[str, Any] | None:
        """As `restore`, from the last readable step; None where nothing was saved.

        Later ones are told of and removed: the run comes to those steps again, and what is there is not written anew.

        Raises:
            RunFailed: there are steps, and none can be read. They are left as they are.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for place, step in enumerate(steps):
            try:
                found = self.restore(step, like)
            except RunFailed as error:
                if step == steps[-1]:
                    raise
                say(f"{error}; trying step {steps[place + 1]}")
            else:
                self._remove(steps[:place])
                return found
        return None

    def _remove(self, steps: Sequence[int]) -> None:
        try:
            for step in steps:
                self._manager.delete(step)
        except OSError as error:
            raise RunFailed(f"{self._folder}: {_cause(error)}") from error

    def _check_room(self, num_bytes: int) -> None:
        """OSError where that much will not fit. Checked first, since orbax reports a full disk at great length."""
        if shutil.disk_usage(self._folder).free < num_bytes + SPARE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remove_partial(self) -> None:
        """Removes an unfinished checkpoint, to free its space.

        Orbax gives up at the first file that fails, while its threads still write others into the folder, which then
        cannot be removed or comes back. What is left after a while goes when the next run starts.
        """
        until_s = time.monotonic() + REMOVAL_S
        while partial := list(self._folder.glob(f"*{PARTIAL}*")):
            for folder in partial:
                shutil.rmtree(folder, ignore_errors=True)
            if time.monotonic() > until_s:
                return
            time.sleep(REMOVAL_PAUSE_S)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _from_paths(like: Any, found: Mapping[str, np.ndarray]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: found[jax.tree_util.keystr(path)], like)


def _cause(error: BaseException) -> str:
    """The cause in one line: the operating system's words where there are any, else the library's first."""
    text = str(error)
    known = [message for message in map(os.strerror, FULL) if message in text]
    return known[0] if known else (text.splitlines() or [type(error).__name__])[0]
