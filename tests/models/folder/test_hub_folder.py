"""A folder as Kimi K2.5's on the hub, its experts packed by compressed-tensors, against Hugging Face transformers.

`kimi_k25_int4` is a random model, quantised and packed by compressed-tensors 0.20; `ref.npz` holds what transformers
computes in float32 from the values that compressed-tensors unpacks: `ids{i}`, `logits0` [T, V], `greedy{i}` [24], and
`deq/<tensor>`, two of its matrices unpacked.
"""

from pathlib import Path

import numpy as np
import pytest

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.generation import load_generation_defaults
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.formats.format import BF16
from moonshard.models.formats.stored import Reader
from moonshard.models.registry import open_model
from moonshard.models.score import Scorer
from moonshard.serving.config.keys import Config, KvConfig, ModelConfig
from moonshard.serving.engine.loading.model import load_model
from tests.agreement import FIXTURES, LOGIT_TOLERANCE
from tests.quantised import converted_folders, guessing_folder, int4_values
from tests.wrapped import VISION

pytestmark = pytest.mark.xdist_group("jax")
FOLDER = FIXTURES / "kimi_k25_int4"
RECORDED = dict(np.load(FOLDER / "ref.npz"))
VISION_TENSORS = {name: np.ones(shape, BF16) for name, shape in VISION.items()}


def test_logits_are_those_of_transformers():
    logits = Scorer(FOLDER).observe(RECORDED["ids0"].tolist()).logits
    np.testing.assert_allclose(logits, RECORDED["logits0"], atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("prompt", [0, 1])
def test_every_greedy_token_is_that_of_transformers(prompt: int):
    ids, greedy = RECORDED[f"ids{prompt}"].tolist(), RECORDED[f"greedy{prompt}"].tolist()
    logits = Scorer(FOLDER).observe([*ids, *greedy]).logits
    assert logits[len(ids) - 1 : -1].argmax(axis=-1).tolist() == greedy


def test_matrices_have_the_bits_that_compressed_tensors_unpacks():
    reader = Reader(open_model(FOLDER)[0])
    names = [name for name in RECORDED if name.startswith("deq/")]
    assert len(names) == 2
    for name in names:
        expected = RECORDED[name]
        found = reader.array(name.removeprefix("deq/"), expected.shape)
        np.testing.assert_array_equal(found.astype(np.float32).view(np.uint32), expected.view(np.uint32))


def test_every_packed_matrix_has_the_bits_of_the_formats_description():
    checkpoint, _ = open_model(FOLDER)
    reader, packed = Reader(checkpoint), [name for name in checkpoint.names if name.endswith(".weight_packed")]
    assert len(packed) == 144
    for name in packed:
        expected = int4_values(checkpoint, name.removesuffix(".weight_packed"))
        found = reader.array(name.removesuffix("_packed"), expected.shape)
        np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def num_told(folder: Path, what: str, caplog: pytest.LogCaptureFixture) -> int:
    """How often a worker that loads the folder says so in its log."""
    model = ModelConfig(path=folder, name="tiny", dtype="float32")
    with caplog.at_level("INFO"):
        config = Config(model=model, kv=KvConfig(block_size=16, num_blocks=8))
        load_model(config, "both", lambda message: None, prepares="none")
    return len([record for record in caplog.records if what in record.getMessage()])


def test_a_tower_beside_it_that_the_ignore_list_forgets_is_skipped_and_told_once(tmp_path: Path, caplog):
    """And its text calls itself what some of those on the hub do."""
    plain = Checkpoint.open(FOLDER)
    tensors = {name: plain.tensor(name) for name in plain.names} | VISION_TENSORS
    text = plain.config["text_config"]
    others = {"model_type": "deepseek_v3", "rope_parameters": text["rope_scaling"] | {"rope_theta": text["rope_theta"]}}
    text = {name: each for name, each in text.items() if name not in ("rope_scaling", "rope_theta")} | others
    write_checkpoint(tmp_path, plain.config | {"text_config": text}, tensors)
    assert num_told(tmp_path, "vision tower", caplog) == 1
    logits = Scorer(tmp_path).observe(RECORDED["ids0"].tolist()).logits
    np.testing.assert_allclose(logits, RECORDED["logits0"], atol=LOGIT_TOLERANCE)


def test_with_a_layer_that_guesses_further_tokens_it_is_the_same_model(tmp_path: Path, caplog):
    recorded, folder = np.load(FIXTURES / "kimi_k2" / "ref.npz"), guessing_folder(tmp_path)
    ids, greedy = recorded["ids0"].tolist(), recorded["greedy0"].tolist()
    logits = Scorer(folder).observe([*ids, *greedy]).logits
    np.testing.assert_allclose(logits[: len(ids)], recorded["logits0"], atol=LOGIT_TOLERANCE)
    assert logits[len(ids) - 1 : -1].argmax(axis=-1).tolist() == greedy
    assert num_told(folder, "guess further tokens", caplog) == 1


def test_and_so_it_is_where_that_layer_is_in_fp8_too(tmp_path: Path):
    """As DeepSeek-V3's."""
    folder, ids = guessing_folder(tmp_path, "fp8"), RECORDED["ids0"].tolist()
    assert Checkpoint.open(folder).dtype("model.layers.4.self_attn.o_proj.weight") == "F8_E4M3"
    expected = Scorer(converted_folders("fp8", "kimi_k2") / "stored").observe(ids).logits
    np.testing.assert_array_equal(Scorer(folder).observe(ids).logits, expected)


def test_it_stops_where_either_file_says():
    assert load_generation_defaults(FOLDER).stop_token_ids == {2017, 2018}
