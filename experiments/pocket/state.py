"""Checkpoints of a run: written whole or not at all, the last two kept, the newest whole one found again.

Orbax writes into a folder of another name and renames it when everything is there. Leaves are stored by their path in
the state, so that neither the order of fields nor the number of devices matters. Left out: what a run was told to do
(`journal`), and the model folder that people use (`export`).
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from moonshard.experiments.pocket.recipe import RunFailed

NUM_KEPT = 2


class Checkpoints:
    """The checkpoints of one run's folder, by step."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=NUM_KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self._folder = folder.absolute()
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def newest(self) -> int | None:
        """The last step of which everything was written."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Nothing happens if the step is there already. RunFailed if it cannot be written; older ones stay whole."""
        if step in self._manager.all_steps():
            return
        try:
            self._manager.save(step, args=ocp.args.StandardSave(_by_path(jax.device_get(state))), force=True)
        except (OSError, ValueError) as error:
            raise RunFailed(f"{self._folder}: step {step} could not be saved: {_first_line(error)}") from error

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step as numpy arrays, in the shape of `like`. RunFailed if it is another model's."""
        wanted = _by_path(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like))
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (KeyError, ValueError, OSError) as error:
            raise RunFailed(f"{self._folder}: step {step} cannot be read: {_first_line(error)}") from error
        return jax.tree_util.tree_map_with_path(lambda path, _: found[jax.tree_util.keystr(path)], like)


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
