"""Moving the routers' biases alone."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.run.balance import LENGTHS, balance, prompt_loads, training_prompts, write_bias
from moonshard.experiments.training.run.progress import worst_load
from moonshard.experiments.training.texts.conversation import TRAIN
from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.tools.tasks import MAX_CONTEXT_TOKENS, prompt_tokens, recall_tasks, tool_tasks
from moonshard.models.folder.checkpoint import CONFIG, Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.spec import ModelError
from tests.experiments.evaluation.random_pocket import SHAPE, write_random_pocket

pytestmark = pytest.mark.xdist_group("jax")
NUM_EXPERTS = SHAPE["n_routed_experts"]


def prompts(number: int) -> Sequence[Sequence[int]]:
    random = np.random.default_rng(number)
    return [random.integers(3, 2000, size=100).tolist() for _ in range(8)]


def load_on(folder: Path, number: int) -> float:
    return worst_load(prompt_loads(GreedyModel(folder, "float32", MAX_CONTEXT_TOKENS), prompts(number)))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = Checkpoint.open(folder)
    return {name: np.array(checkpoint.tensor(name)) for name in checkpoint.names}


def test_loads_become_even_on_other_prompts_and_nothing_but_biases_changes(tmp_path: Path) -> None:
    folder, said = write_random_pocket(tmp_path / "pocket"), []
    skewed = np.zeros((1, NUM_EXPERTS), np.float32)
    skewed[0, 3] = 0.5
    write_bias(folder, skewed)
    before, config = tensors_of(folder), json.loads((folder / CONFIG).read_text())
    assert load_on(folder, 99) > 2.0
    balance(folder, prompts, np.geomspace(0.2, 0.01, 24).tolist(), said.append)
    assert load_on(folder, 99) < 1.4
    after = tensors_of(folder)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name].tobytes() != before[name].tobytes()} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
    assert json.loads((folder / CONFIG).read_text()) == config
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set()
    assert len(said) == 24 + 1
    assert re.search(r": router load 1\.[0-3]\d in a round of other prompts$", said[-1])


def test_another_bias_is_what_the_next_prompt_meets(tmp_path: Path) -> None:
    model = GreedyModel(write_random_pocket(tmp_path / "pocket"), "float32", MAX_CONTEXT_TOKENS)
    first = prompt_loads(model, prompts(0))
    busiest, bias = first[0].argmax(), np.array(model.router_bias)
    bias[0, busiest] -= 100.0
    model.router_bias = bias
    again = prompt_loads(model, prompts(0))  # the very prompts whose blocks are known
    assert first[0, busiest] > 0
    assert again[0, busiest] == 0
    assert again.sum() == first.sum()


def test_a_model_without_experts_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    folder = write_random_pocket(tmp_path / "pocket")
    shape = SHAPE | {"first_k_dense_replace": SHAPE["num_hidden_layers"]}
    dense = {name: value for name, value in tensors_of(folder).items() if not name.startswith("model.layers.1.mlp")}
    mlp = {name: value for name, value in dense.items() if name.startswith("model.layers.0.mlp")}
    dense |= {name.replace("layers.0", "layers.1"): value for name, value in mlp.items()}
    (folder / "model.safetensors").unlink()
    write_checkpoint(folder, shape, dense)
    before = tensors_of(folder)
    with pytest.raises(ModelError, match="no layer has routed experts"):
        balance(folder, prompts, [0.1], lambda _line: None)
    assert {name: value.tobytes() for name, value in tensors_of(folder).items()} == {
        name: value.tobytes() for name, value in before.items()
    }


def test_a_folder_with_several_files_of_weights_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(write_random_pocket(tmp_path / "pocket"))
    write_checkpoint(tmp_path / "several", SHAPE, tensors, max_shard_bytes=1 << 14)
    with pytest.raises(CheckpointError, match="several files"):
        balance(tmp_path / "several", prompts, [0.1], lambda _line: None)


def test_weights_that_are_replaced_meanwhile_keep_their_biases(tmp_path: Path) -> None:
    folder, other = write_random_pocket(tmp_path / "pocket"), write_random_pocket(tmp_path / "other", seed=1)

    def replaces(number: int) -> Sequence[Sequence[int]]:
        shutil.copy(other / "model.safetensors", folder / "model.new")
        (folder / "model.new").replace(folder / "model.safetensors")
        return prompts(number)

    with pytest.raises(CheckpointError, match="replaced meanwhile"):
        balance(folder, replaces, [0.1], lambda _line: None)
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_prompts_are_as_long_as_the_evaluation_s_and_of_the_training_split() -> None:
    text = pocket_text()
    lengths = sorted(len(prompt) for prompt in training_prompts(text, 0))
    assert sum(3800 < length <= 4000 for length in lengths) == 5
    assert sum(1900 < length <= 2048 for length in lengths) >= 5
    assert len(lengths) == 3 * 5 + 24 + 6
    tasks = [task for length in LENGTHS for task in recall_tasks(text, 1000, length, 25, TRAIN)[::6]]
    tasks += tool_tasks(1000, 24, TRAIN)
    assert training_prompts(text, 0) == [prompt_tokens(text, task.messages, task.tools) for task in tasks]
    assert training_prompts(text, 0) != training_prompts(text, 1)
