"""`-m moonshard.experiments.training.draft.acceptance`: how many tokens a step gives with the draft, on held-out turns.

An offline simulation: the model answers greedily without a draft, then the draft guesses along those answers as it
would when serving, over pages, by `models.draft`: extend over what was accepted, a chain of three, compare. A step has
the accepted guesses and one token that the model draws itself: 1 to 4. Near ties of logits do not enter, since the
guesses are compared with tokens.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.training.draft.learn import DRAFT
from moonshard.experiments.training.draft.objective import NUM_GUESSES, Objective
from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.run.beginning import folder_weights
from moonshard.experiments.training.texts.corpus import POCKET, pocket_text
from moonshard.experiments.training.texts.tools.tasks import (
    MAX_ANSWER_TOKENS,
    MAX_CONTEXT_TOKENS,
    Task,
    client_tasks,
    prompt_tokens,
    recall_tasks,
    talk_tasks,
    tool_tasks,
)
from moonshard.kv.pages import Pages
from moonshard.models import weights
from moonshard.models.draft import chain, lend
from moonshard.models.eagle.draft import Eagle
from moonshard.models.folder.checkpoint import CheckpointError
from moonshard.models.folder.generation import load_generation_defaults
from moonshard.models.model import Batch, LatentModel
from moonshard.models.registry import open_draft, open_model
from moonshard.models.spec import ModelError
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape

BLOCK_SIZE = 64
LONGEST = 1280  # tokens of a prompt and its answer; longer ones are left out
TOGETHER = 8  # sequences


@dataclass(frozen=True, slots=True)
class Answered:
    """A sequence: `num_prompt` tokens, then those that the model said, its end among them."""

    tokens: tuple[int, ...]
    num_prompt: int


class Simulation:
    """The draft of a folder beside the embedded model, both in float32."""

    def __init__(self, folder: Path):
        mesh = build_mesh(MeshShape())
        checkpoint, model = open_model(POCKET)
        assert isinstance(model, LatentModel)
        source, draft = open_draft(folder, model, checkpoint)
        assert isinstance(draft, Eagle)
        self._target = folder_weights(model, POCKET, mesh)
        self._draft = draft
        self._weights = lend(weights.load(draft.declare(), source, "float32", mesh), self._target)
        self._objective = Objective(model, draft)
        self._taught = jax.jit(self._objective.taught)
        self._first_guesses = jax.jit(self._objective.first_guesses)
        self._extend = jax.jit(draft.extend, donate_argnums=1)
        self._chain = jax.jit(functools.partial(chain, draft), static_argnums=5, donate_argnums=1)

    def steps(self, some: Sequence[Answered]) -> list[list[int]]:
        """Of each sequence, the number of guesses that each step got right."""
        tokens = np.zeros((TOGETHER, LONGEST), np.int32)
        for row, each in enumerate(some):
            tokens[row, : len(each.tokens)] = each.tokens
        positions = np.arange(LONGEST)[None] + np.zeros((TOGETHER, 1), int)
        lengths = np.array([len(each.tokens) for each in some] + [0] * (TOGETHER - len(some)))
        positions = np.where(positions < lengths[:, None], positions, -1).astype(np.int32)
        _, features = self._taught(self._target, jnp.asarray(tokens), jnp.asarray(positions))
        features = np.asarray(features)
        num_columns = LONGEST // BLOCK_SIZE
        tables = jnp.arange(TOGETHER * num_columns, dtype=jnp.int32).reshape(TOGETHER, 1, num_columns)
        (group,) = self._draft.kv_groups("float32")
        pages: Any = jnp.zeros((TOGETHER * num_columns, 1, BLOCK_SIZE, group.num_features), jnp.float32)
        begin = np.zeros(TOGETHER, int)  # the first row that was not run with the target's features
        known = np.array([each.num_prompt + 1 for each in some] + [0] * (TOGETHER - len(some)))  # tokens drawn so far
        found: list[list[int]] = [[] for _ in some]
        width = LONGEST - 1
        while (known < lengths).any():
            is_running = known < lengths
            ends = np.where(is_running, known - 1, 0)  # rows up to here have a token behind them
            hidden, pages = self._accepted(pages, tables, tokens, features, begin, ends, width)
            last = jnp.asarray(np.where(is_running, ends - 1, -1), jnp.int32)
            guesses, pages = self._chain(self._weights, pages, tables, last, hidden, NUM_GUESSES)
            for row in np.flatnonzero(is_running):
                true = tokens[row, known[row] : lengths[row]][:NUM_GUESSES]
                right = np.asarray(guesses)[row, : len(true)] == true
                num_right = int(np.cumprod(right).sum())
                if len(true) == NUM_GUESSES:  # fewer could be right at an answer's end
                    found[row].append(num_right)
                begin[row], known[row] = ends[row], known[row] + num_right + 1
            width = NUM_GUESSES + 1
        return found

    def first_guesses(self, each: Answered) -> tuple[jax.Array, jax.Array]:
        """Logits of the target and of the draft's first guess, at each token of the answer but the first."""
        tokens, length = np.zeros((1, LONGEST), np.int32), len(each.tokens)
        tokens[0, :length] = each.tokens
        positions = np.where(np.arange(LONGEST) < length, np.arange(LONGEST), -1)[None].astype(np.int32)
        target, draft = self._first_guesses(self._weights, self._target, jnp.asarray(tokens), jnp.asarray(positions))
        at = np.arange(each.num_prompt - 1, length - 2)  # rows t, which say the token at t + 2
        return target[0, at], draft[0, at]

    def _accepted(
        self,
        pages: Pages,
        tables: jax.Array,
        tokens: np.ndarray,
        features: np.ndarray,
        begin: np.ndarray,
        ends: np.ndarray,
        width: int,
    ) -> tuple[jax.Array, Pages]:
        """Runs the rows from `begin` to `ends`, at most `width`; the last one's hidden states."""
        at = begin[:, None] + np.arange(width)[None]
        is_real = at < ends[:, None]
        place = np.minimum(at, LONGEST - 2)
        batch = Batch(
            tokens=jnp.asarray(np.take_along_axis(tokens, place + 1, axis=1)),
            positions=jnp.asarray(np.where(is_real, at, -1).astype(np.int32)),
            block_tables=tables,
        )
        fed = jnp.asarray(np.take_along_axis(features, place[..., None], axis=1))
        hidden, pages = self._extend(self._weights, pages, batch, fed)
        return hidden[jnp.arange(TOGETHER), np.maximum(ends - begin - 1, 0)], pages


def answered(tasks: Sequence[Task], model: GreedyModel) -> list[Answered]:
    """What the model says to each task's question, its first turn, as far as that fits."""
    stops = load_generation_defaults(POCKET).stop_token_ids
    text = pocket_text()
    prompts = [prompt_tokens(text, task.messages, task.tools) for task in tasks]
    prompts = [prompt for prompt in prompts if len(prompt) + MAX_ANSWER_TOKENS < LONGEST]
    end = text.tokenizer.special_tokens["<|im_end|>"]
    answers = model.generate(prompts, MAX_ANSWER_TOKENS, stops)
    return [Answered((*prompt, *answer, end), len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


def accept_length(simulation: Simulation, some: Sequence[Answered]) -> tuple[float, list[float], int]:
    """Tokens a step, the share of steps with at least 1, 2, 3 right guesses, and how many steps there were."""
    steps = np.array(
        [
            number
            for first in range(0, len(some), TOGETHER)
            for each in simulation.steps(some[first : first + TOGETHER])
            for number in each
        ]
    )
    return 1 + float(steps.mean()), [float((steps > index).mean()) for index in range(NUM_GUESSES)], len(steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moonshard.experiments.training.draft.acceptance", description=__doc__
    )
    parser.add_argument("--draft", type=Path, default=DRAFT, metavar="DIR", help="default: beside the embedded model")
    parser.add_argument("--num", type=int, default=64, help="tasks of each kind; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        simulation, model = Simulation(options.draft), GreedyModel(POCKET, "float32", MAX_CONTEXT_TOKENS)
    except (CheckpointError, ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    kinds = {
        "tool calls": [task for task in tool_tasks(options.seed, options.num) if task.rounds],
        "clients' tool calls": client_tasks(options.seed, options.num),
        "small talk": talk_tasks(options.seed, options.num),
        "recall": recall_tasks(pocket_text(), options.seed, 512, options.num),
    }
    for name, tasks in kinds.items():
        length, shares, num_steps = accept_length(simulation, answered(tasks, model))
        told = ", ".join(f"{share:.3f}" for share in shares)
        print(
            f"{name}: {length:.2f} of {NUM_GUESSES + 1} tokens a step; right guesses {told}; {num_steps} steps",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
