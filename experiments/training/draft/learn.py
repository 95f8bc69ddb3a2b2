"""`-m moonshard.experiments.training.draft.learn`: trains the embedded model's draft, and writes its folder.

A run that was stopped goes on from its last checkpoint. What a step sees depends on seed and step alone.
"""

import argparse
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from optax.contrib import muon

from moonshard.experiments.training.draft.beginning import first_weights
from moonshard.experiments.training.draft.objective import Objective
from moonshard.experiments.training.draft.shape import HUGGING_FACE_DRAFT
from moonshard.experiments.training.folder import claim
from moonshard.experiments.training.run.beginning import folder_weights
from moonshard.experiments.training.run.checkpoints import Checkpoints
from moonshard.experiments.training.run.optimiser import (
    ADAM_B1,
    ADAM_B2,
    CONSISTENT_RMS,
    HEADS_IN,
    HEADS_OUT,
    PLAIN,
)
from moonshard.experiments.training.run.recipe import RunFailed, TrainingStage
from moonshard.experiments.training.run.step import Lesson, place
from moonshard.experiments.training.texts.conversation import TRAIN
from moonshard.experiments.training.texts.corpus import POCKET, batch
from moonshard.models.eagle.config import EagleConfig
from moonshard.models.eagle.draft import Eagle
from moonshard.models.eagle.weights import EagleWeights, Stored
from moonshard.models.folder.checkpoint import CONFIG, WEIGHTS, CheckpointError
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.model import LatentModel
from moonshard.models.registry import open_model
from moonshard.models.spec import ModelError
from moonshard.models.weights import is_param
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape

DRAFT = POCKET.parent / "pocket_draft"
RUN_FOLDER = Path("results/pocket-draft")
SHARES = (("tools", 0.36), ("clients", 0.30), ("agents", 0.16), ("talk", 0.06), ("recall", 0.12))
STAGE = TrainingStage(
    name="draft", num_tokens=512, num_rows=4, num_steps=0, gapped_share=0.2, shares=SHARES, call_weight=2.0
)
LEARNING_RATE, WEIGHT_DECAY, MAX_GRADIENT_NORM = 5e-3, 0.01, 1.0
NUM_WARMUP_STEPS, DECAY_SHARE = 10, 0.5
STEPS_PER_LINE, SECONDS_PER_CHECKPOINT = 20, 120.0
MATRICES = {
    "fc": PLAIN,
    "q": HEADS_OUT,
    "k": HEADS_OUT,
    "v": HEADS_OUT,
    "out": HEADS_IN,
    "gate_up": PLAIN,
    "down": PLAIN,
}
Step = Callable[[Any, Any, Any, Lesson], tuple[Any, Any, jax.Array, jax.Array]]


def pocket_draft(model: LatentModel) -> Eagle:
    """The draft as it will be stored: tables borrowed, the whole vocabulary."""
    config = EagleConfig.from_hugging_face(HUGGING_FACE_DRAFT, model.config)
    return Eagle(config=config, stored=Stored(has_embed=False, has_head=False, has_targets=False))


def build_optimiser(draft: Eagle, num_steps: int) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for norms; a constant rate, which falls to nothing in the end."""
    dimensions: Any = jax.tree_util.tree_map_with_path(
        lambda path, _: MATRICES.get(path[-1].name), draft.declare(), is_leaf=is_param
    )
    rate = optax.schedules.join_schedules(
        [
            optax.schedules.linear_schedule(0.0, LEARNING_RATE, NUM_WARMUP_STEPS),
            optax.schedules.constant_schedule(LEARNING_RATE),
            optax.schedules.linear_schedule(LEARNING_RATE, 0.0, max(1, int(DECAY_SHARE * num_steps))),
        ],
        [NUM_WARMUP_STEPS, num_steps - int(DECAY_SHARE * num_steps)],
    )
    update = muon(
        rate,
        weight_decay=WEIGHT_DECAY,
        adam_b1=ADAM_B1,
        adam_b2=ADAM_B2,
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=CONSISTENT_RMS,
    )
    return optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), update)


def build_step(objective: Objective, optimiser: optax.GradientTransformation) -> Step:
    """A jitted step, to which weights and the optimiser's state are donated: both anew, the loss, the shares."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(own: Any, state: Any, target: Any, lesson: Lesson) -> tuple[Any, Any, jax.Array, jax.Array]:
        (loss, shares), gradient = jax.value_and_grad(objective.loss, has_aux=True)(own, target, lesson)
        updates, state = optimiser.update(gradient, state, own)
        return optax.apply_updates(own, updates), state, loss, shares

    return step


def learn(folder: Path, num_steps: int, seed: int, say: Callable[[str], None]) -> tuple[Eagle, EagleWeights[Any]]:
    """Trains to the end. RunFailed, CheckpointError or ModelError where the run or the target cannot be read."""
    mesh = build_mesh(MeshShape())
    _, model = open_model(POCKET)
    assert isinstance(model, LatentModel)
    target, draft = folder_weights(model, POCKET, mesh), pocket_draft(model)
    optimiser = build_optimiser(draft, num_steps)
    step_of = build_step(Objective(model, draft), optimiser)
    own: Any = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), first_weights(draft, seed))
    state, first = optimiser.init(own), 0
    with claim(folder):
        checkpoints = Checkpoints(folder / "checkpoints")
        parts = {"weights": own, "progress": {"optimiser": state, "step": jnp.int32(0)}}
        if (found := checkpoints.restore_newest(parts, say)) is not None:
            own, state = jax.tree.map(jnp.asarray, (found["weights"], found["progress"]["optimiser"]))
            first = int(found["progress"]["step"])
        say(f"{num_steps} steps of {STAGE.num_rows} x {STAGE.num_tokens} tokens; {first} are done")
        saved_s = begun_s = time.monotonic()
        for step in range(first, num_steps):
            lesson = place(batch(TRAIN, seed, step, STAGE), mesh)
            own, state, loss, shares = step_of(own, state, target, lesson)
            is_end = step + 1 == num_steps
            if (step + 1) % STEPS_PER_LINE == 0 or is_end:
                told = " ".join(f"{share:.3f}" for share in np.asarray(shares))
                say(f"step {step + 1}: loss {float(loss):.3f}, right {told}, {time.monotonic() - begun_s:.0f} s")
            if is_end or time.monotonic() - saved_s > SECONDS_PER_CHECKPOINT:
                progress = {"optimiser": state, "step": jnp.int32(step + 1)}
                checkpoints.save(step + 1, {"weights": own, "progress": progress})
                saved_s = time.monotonic()
    return draft, own


def write(draft: Eagle, own: EagleWeights[Any], out: Path) -> None:
    """The draft's folder in bfloat16, in the hub's format; replaces the one that is there."""
    tensors: dict[str, np.ndarray] = {}
    leaves = zip(jax.tree.leaves(draft.declare(), is_leaf=is_param), jax.tree.leaves(own), strict=True)
    for param, leaf in leaves:
        values = np.asarray(leaf).astype(ml_dtypes.bfloat16)
        for index in itertools.product(*map(range, param.shape[: param.stacked])):
            tensors[param.source(*index)] = np.ascontiguousarray(values[index]).reshape(param.whole_tensor)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".draft-") as written:
        write_checkpoint(written, HUGGING_FACE_DRAFT, dict(sorted(tensors.items())))
        for name in (WEIGHTS, CONFIG):
            (Path(written) / name).replace(out / name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moonshard.experiments.training.draft.learn", description=__doc__)
    parser.add_argument("--run", type=Path, default=RUN_FOLDER, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=DRAFT, metavar="DIR", help="default: beside the embedded model")
    parser.add_argument("--steps", type=int, default=240, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        draft, own = learn(options.run, options.steps, options.seed, functools.partial(print, flush=True))
        write(draft, own, options.out)
    except (RunFailed, CheckpointError, ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
