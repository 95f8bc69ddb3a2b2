"""The text part of a folder in which vision stands beside it is read as the plain folder of the same model."""

import json
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
import pytest

from moonshard.models import weights
from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.generation import load_generation_defaults
from moonshard.models.folder.text_part import not_read, text_part
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.weights import declare
from moonshard.models.registry import open_model
from moonshard.models.score import Scorer
from moonshard.models.spec import ModelError
from moonshard.models.tokenizers.tokenizer import load_tokenizer
from tests.agreement import FIXTURES, LOGIT_TOLERANCE
from tests.wrapped import VISION, wrapped, wrapped_config

pytestmark = pytest.mark.xdist_group("jax")
PLAIN = FIXTURES / "kimi_k2"
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wrapped(PLAIN, tmp_path_factory.mktemp("wrapped"))


def lines(checkpoint: Checkpoint, num_layers: int = NUM_LAYERS) -> list[tuple[int, str]]:
    config = KimiConfig.from_hugging_face(Checkpoint.open(PLAIN).config)
    return list(not_read(checkpoint, weights.tensors_of(declare(config)), num_layers))


def test_its_tensors_have_the_names_and_values_of_the_plain_folder(folder: Path):
    plain, text = Checkpoint.open(PLAIN), open_model(folder)[0]
    assert text.names == plain.names
    assert text.num_bytes == plain.num_bytes
    for name in plain.names:
        np.testing.assert_array_equal(text.tensor(name), plain.tensor(name))


def test_it_is_the_model_of_the_plain_folder(folder: Path):
    assert open_model(folder)[1] == open_model(PLAIN)[1]


def test_its_logits_are_those_of_hugging_face(folder: Path):
    recorded = np.load(PLAIN / "ref.npz")
    logits = Scorer(folder).observe(recorded["ids0"].tolist()).logits
    np.testing.assert_allclose(logits, recorded["logits0"], atol=LOGIT_TOLERANCE)


def test_its_vocabulary_and_its_ends_are_those_of_the_plain_folder(folder: Path, tmp_path: Path):
    assert load_generation_defaults(folder) == load_generation_defaults(PLAIN)
    for file in (
        "config.json",
        "tiktoken.model",
        "tokenizer_config.json",
    ):  # on the hub there is no other
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    found, plain = load_tokenizer(tmp_path), load_tokenizer(PLAIN)
    assert found is not None
    assert plain is not None
    assert found.special_tokens == plain.special_tokens


def test_what_does_not_compute_on_text_is_no_part_of_the_fingerprint(folder: Path, tmp_path: Path):
    before = wrapped(PLAIN, tmp_path / "before")
    data = bytearray((before / "model.safetensors").read_bytes())
    vision = Checkpoint.open(before).tensor("mm_projector.proj.0.weight")
    (tmp_path / "after").mkdir()
    at = data.find(vision.tobytes())
    data[at : at + 2] = b"\0\0"
    (tmp_path / "after" / "model.safetensors").write_bytes(data)
    (tmp_path / "after" / "config.json").write_bytes((before / "config.json").read_bytes())
    changed = Checkpoint.open(tmp_path / "after")
    assert changed.fingerprint != Checkpoint.open(folder).fingerprint
    assert text_part(changed).fingerprint == text_part(Checkpoint.open(folder)).fingerprint


def test_a_fault_names_the_tensor_as_the_file_does(folder: Path):
    text = text_part(Checkpoint.open(folder))
    with pytest.raises(CheckpointError, match=r"no tensor 'language_model\.model\.nowhere'$"):
        text.tensor("model.nowhere")
    assert text.where("lm_head.weight") == f"{folder}/model.safetensors: tensor 'language_model.lm_head.weight'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "text_config.hidden_size is missing"),
        ({"model_type": "llama"}, "text_config.model_type is 'llama', not supported (known: deepseek_v3, kimi_k2)"),
        ({"n_group": 3}, "text_config.n_group = 3 does not divide n_routed_experts = 16"),
        ({"rope_scaling": {"type": "linear"}}, "text_config.rope_scaling.type is 'linear'"),
        ({"rope_parameters": {"type": "yarn", "factor": 0}}, "text_config.rope_parameters.factor is 0"),
    ],
)
def test_a_faulty_field_is_named_with_where_it_stands(change: dict[str, object], message: str):
    raw = wrapped_config(Checkpoint.open(PLAIN).config)
    raw["text_config"] |= change
    with pytest.raises(ModelError) as caught:
        KimiConfig.from_hugging_face(raw)
    assert str(caught.value).startswith(f"config.json: {message}")


@pytest.mark.parametrize("text", [None, [], "kimi_k2"])
def test_a_wrapped_configuration_without_a_text_part_is_refused(text: object):
    with pytest.raises(ModelError, match=r"config\.json: text_config is "):
        KimiConfig.from_hugging_face({"model_type": "kimi_k25", "text_config": text})


def test_a_plain_folder_says_nothing_of_what_is_not_read():
    assert lines(text_part(Checkpoint.open(PLAIN))) == []


def test_vision_is_told_once_with_its_number_of_tensors(folder: Path):
    ((level, line),) = lines(text_part(Checkpoint.open(folder)))
    assert level == INFO
    assert line.startswith(f"{len(VISION)} tensors of the vision tower and its projector are skipped")


def test_every_kind_of_tensor_that_is_not_read_is_told_once(tmp_path: Path):
    guessing = ("enorm.weight", "mlp.up_proj.weight_packed")
    names = [f"model.layers.{layer}.{name}" for layer in (4, 5) for name in guessing]
    names += ["model.layers.0.self_attn.rotary_emb.inv_freq"]  # a function of the configuration
    names += ["model.layers.0.mlp.up_proj.weight_scale_inv", "model.layers.1.mlp.experts.0.up_proj.weight_shape"]
    unknown = [f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in range(4)]
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate([*names, *unknown])
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4 * len(header))
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    layers, others = lines(Checkpoint.open(tmp_path))
    assert layers == (INFO, "4 tensors of layers from 4 on are skipped: they guess further tokens")
    named = ", ".join(repr(name) for name in unknown[:3])
    assert others == (WARNING, f"4 tensors have no place in the model and are not read: {named}, ...")
