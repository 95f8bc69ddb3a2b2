"""`-m moonshard.experiments.training.run.balance`: a model folder's routers, biased until experts have even loads.

Training keeps the loads even over its own rows, most of them short, and a mean of weights has a mean of biases that
fits none of them. So the bias alone is moved once more, while all else stays, over prompts like the evaluation's, but
of the training split. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, here in proportion to what an expert has
too much, in steps that grow smaller, and with the mean of the last ones (Polyak and Juditsky, 1992).
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.run.progress import worst_load
from moonshard.experiments.training.texts.conversation import TRAIN
from moonshard.experiments.training.texts.corpus import POCKET, Text, pocket_text
from moonshard.experiments.training.texts.tools.tasks import (
    MAX_CONTEXT_TOKENS,
    NUM_DEPTHS,
    Task,
    prompt_tokens,
    recall_tasks,
    tool_tasks,
)
from moonshard.models.folder.checkpoint import INDEX, WEIGHTS, Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.spec import ModelError

RATES = tuple(np.geomspace(0.1, 0.01, 32))  # by how much a round moves a bias at most; routing scores are 0 to 1
FIRST_SEED = 1000
LENGTHS = (512, 2048, 4000)
NUM_DOCUMENTS, NUM_CONVERSATIONS = 5, 24  # of each length, and with calls, in a round
BIAS = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias")

Prompts = Sequence[Sequence[int]]


def balance(folder: Path, draw: Callable[[int], Prompts], rates: Sequence[float], say: Callable[[str], None]) -> None:
    """Replaces the folder's weights by the same with other biases, whole or not at all.

    Args:
        draw: the prompts of a round, by its number.
        rates: of the rounds.
        say: told of each round.

    Raises CheckpointError or ModelError for a folder that cannot be used, has several files of weights or no router, or
    whose weights somebody replaces meanwhile.
    """
    if (folder / INDEX).exists():
        raise CheckpointError(f"{folder / INDEX}: weights in several files are not written anew")
    model = GreedyModel(folder, "float32", MAX_CONTEXT_TOKENS)
    bias, tried = model.router_bias, []
    check_names(Checkpoint.open(folder), len(bias))
    for number, rate in enumerate(rates):
        loads = prompt_loads(model, draw(number))
        say(f"round {number + 1} of {len(rates)}: router load {worst_load(loads):.2f}, max / mean of the worst layer")
        excess = loads / loads.mean(axis=1, keepdims=True) - 1
        bias = bias - rate * np.clip(excess, -1, 1)
        tried.append(bias)
        model.router_bias = bias
    model.router_bias = np.mean(tried[len(tried) // 2 :], axis=0)
    loads = prompt_loads(model, draw(len(rates)))
    if Checkpoint.open(folder).fingerprint != model.fingerprint:
        raise CheckpointError(f"{folder}: its weights were replaced meanwhile; nothing was written")
    write_bias(folder, model.router_bias)
    say(f"{folder}: router load {worst_load(loads):.2f} in a round of other prompts")


def prompt_loads(model: GreedyModel, prompts: Prompts) -> np.ndarray:
    """Tokens of the prompts that each expert handled, [layers with experts, experts]."""
    before = model.expert_loads.copy()
    model.generate(prompts, 1, ())
    return model.expert_loads - before


def check_names(checkpoint: Checkpoint, num_layers: int) -> None:
    """CheckpointError unless the folder's biases have the names and the number that are written."""
    if len(found := routers_of(checkpoint)) != num_layers:
        raise CheckpointError(f"{checkpoint.folder}: {len(found)} biases of routers, {num_layers} layers with experts")


def routers_of(checkpoint: Checkpoint) -> list[str]:
    """The names of the biases, by layer."""
    layers = {int(found[1]): name for name in checkpoint.names if (found := BIAS.fullmatch(name))}
    return [layers[layer] for layer in sorted(layers)]


def write_bias(folder: Path, bias: np.ndarray) -> None:
    """Writes the biases [layers with experts, experts], by layer."""
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.names:
        checkpoint.expect(name)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names}
    for name, row in zip(routers_of(checkpoint), bias, strict=True):
        tensors[name] = row.astype(tensors[name].dtype)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".balance-") as written:
        write_checkpoint(written, checkpoint.config, tensors)
        os.replace(Path(written) / WEIGHTS, folder / WEIGHTS)


def training_prompts(text: Text, number: int) -> Prompts:
    """The prompts of a round: documents as long as the evaluation's, and conversations with tools."""
    seed = FIRST_SEED + number
    tasks: list[Task] = []
    for length in LENGTHS:
        tasks += recall_tasks(text, seed, length, NUM_DOCUMENTS * NUM_DEPTHS, TRAIN)[:: NUM_DEPTHS + 1]
    tasks += tool_tasks(seed, NUM_CONVERSATIONS, TRAIN)
    return [prompt_tokens(text, task.messages, task.tools) for task in tasks]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moonshard.experiments.training.run.balance", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=POCKET, metavar="DIR", help="default: the embedded model's folder"
    )
    options = parser.parse_args()
    text = pocket_text()
    try:
        balance(options.model, partial(training_prompts, text), RATES, partial(print, flush=True))
    except (CheckpointError, ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
