"""A whole run of the trainer in seconds: a model of a few thousand weights that learns to go on with what repeats.

python -m tests.experiments.training.rehearsal FOLDER SECONDS_PER_CHECKPOINT
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moonshard.experiments.training.run.loop import Rhythm, train
from moonshard.experiments.training.run.recipe import Recipe, Rows, TrainingStage
from moonshard.experiments.training.run.train import run, say
from moonshard.experiments.training.shape import HUGGING_FACE_CONFIG

VOCAB_SIZE, PERIOD = 32, 5
SHAPE = HUGGING_FACE_CONFIG | {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
RECIPE = Recipe(
    stages=(
        TrainingStage(name="short", num_tokens=16, num_rows=8, num_steps=12),
        TrainingStage(name="long", num_tokens=24, num_rows=8, num_steps=28),
    ),
    num_warmup_steps=5,
    learning_rate=1e-2,
)


class Repeats:
    """Rows of a few random tokens over and over; the last of a row are padding."""

    def rows(self, stage: TrainingStage, step: int) -> Rows:
        return self._rows(stage.num_rows, stage.num_tokens, step)

    def alike(self) -> Sequence[tuple[int, int]]:
        return ()

    def held_out(self) -> Mapping[str, Rows]:
        return {"repeat": self._rows(8, 24, 1_000_000)}

    def _rows(self, num_rows: int, num_tokens: int, seed: int) -> Rows:
        random = np.random.default_rng(seed)
        once = random.integers(3, VOCAB_SIZE, (num_rows, PERIOD))
        tokens = np.tile(once, (1, num_tokens))[:, : num_tokens + 1].astype(np.int32)
        weights = np.full((num_rows, num_tokens), 0.1, np.float32)
        weights[:, PERIOD:-2] = 1.0
        weights[:, -2:] = 0.0
        positions = np.sort(random.choice(100, (num_rows, num_tokens)), axis=1).astype(np.int32)
        return Rows(tokens=tokens, weights=weights, positions=positions)


def main(folder: str, seconds_per_checkpoint: str) -> int:
    rhythm = Rhythm(steps_per_line=4, steps_per_measurement=20, seconds_per_checkpoint=float(seconds_per_checkpoint))
    return run(
        lambda stop: train(
            RECIPE,
            SHAPE,
            Repeats(),
            Path(folder),
            rhythm=rhythm,
            is_stopping=lambda: stop.received is not None,
            say=say,
        )
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
