"""Number formats that are not served are refused by name, and those that are served pass whatever lists they carry."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.known import KNOWN
from moonshard.models.folder.quantization import check_config, check_formats
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.registry import model_of
from moonshard.models.spec import ModelError
from tests.agreement import FIXTURES
from tests.wrapped import wrapped_config

WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
K25 = {  # as in the hub's config.json
    "config_groups": {
        "group_0": {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": WEIGHTS}
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
K2 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
GROUP = "config_groups.group_0"


def changed(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`config` with another value at a path of names; without the name where the value is `...`."""
    found = copy.deepcopy(dict(config))
    *outer, last = path.split(".")
    inner = found
    for name in outer:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return found


def fault(config: object, at: str = "quantization_config") -> str:
    """The one message with which it is refused, without the file's name and the field's beginning."""
    with pytest.raises(ModelError) as caught:
        check_config({"quantization_config": config})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"config.json: {at}")
    return message.removeprefix(f"config.json: {at}").removeprefix(".")


@pytest.mark.parametrize(
    "config",
    [
        K25,
        K2,
        {**K2, "scale_fmt": "ue8m0"},
        changed(K25, "quant_method", ...),
        changed(K25, f"{GROUP}.weights.actorder", "static"),
        changed(K25, f"{GROUP}.format", "pack-quantized"),
        changed(changed(K25, f"{GROUP}.format", "pack-quantized"), "format", "mixed-precision"),
        changed(K25, "kv_cache_scheme", {"num_bits": 8}),
        changed(K25, "sparsity_config", {"format": "dense"}),
        changed(
            changed(K25, f"{GROUP}.weights", {**WEIGHTS, "num_bits": 8, "strategy": "channel", "group_size": None}),
            "format",
            "int-quantized",
        ),
    ],
)
def test_what_is_served_passes_at_the_top_and_inside_the_text_part(config: dict[str, Any]):
    check_config({"quantization_config": config})
    check_config({"text_config": {"quantization_config": config}, "quantization_config": config})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{GROUP}.weights.symmetric", False, "is False: asymmetric weights"),
        (f"{GROUP}.weights.num_bits", 8, "is 8: with pack-quantized, 4 bits"),
        (f"{GROUP}.weights.num_bits", 2, "is 2: with pack-quantized, 4 bits"),
        (f"{GROUP}.weights.num_bits", ..., "is missing: with pack-quantized, 4 bits"),
        (f"{GROUP}.weights.type", "float", "is 'float': with pack-quantized, int"),
        (f"{GROUP}.weights.group_size", 128, "is 128: groups of 32"),
        (f"{GROUP}.weights.strategy", "channel", "is 'channel': with pack-quantized, group"),
        (f"{GROUP}.weights.actorder", "group", "is 'group': activation ordering"),
        (f"{GROUP}.weights.actorder", True, "is True: activation ordering"),
        (f"{GROUP}.weights.dynamic", True, "is True: weights without stored scales"),
        (f"{GROUP}.weights", [4], "is [4], not an object"),
        (f"{GROUP}.input_activations", {"num_bits": 8}, "activation-quantised"),
        (f"{GROUP}.output_activations", {"num_bits": 8}, "activation-quantised"),
        (f"{GROUP}.format", "nvfp4-pack-quantized", "is 'nvfp4-pack-quantized' (NVFP4), which is not served"),
        ("format", "nvfp4-pack-quantized", "is 'nvfp4-pack-quantized' (NVFP4), which is not served"),
        ("format", "mxfp4-pack-quantized", "is 'mxfp4-pack-quantized' (MXFP4), which is not served"),
        ("format", "float-quantized", "is 'float-quantized' (FP8 of compressed-tensors), which is not served"),
        ("format", "marlin-24", "(sparse INT4), which is not served"),
        ("format", ..., "is missing, which is not served"),
        ("format", ["pack-quantized"], "which is not served"),
        ("transform_config", {"config_groups": {"u": {}}}, "rotated or transformed"),
        ("sparsity_config.format", "sparse-24-bitmask", "is 'sparse-24-bitmask': sparse weights"),
        ("config_groups", None, "is missing"),
    ],
)
def test_what_compressed_tensors_has_and_is_not_served_is_refused_by_its_field(path: str, value: object, message: str):
    told = fault(changed({**K25, "sparsity_config": {}}, path, value))
    assert told.startswith(f"{path} ")
    assert message in told


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "weight_block_size",
            None,
            "is missing: FP8 is served with a scale to every block of [128, 128], not",
        ),
        ("weight_block_size", [1, 128], "is [1, 128]: FP8 is served with a scale to every block"),
        ("weight_block_size", [64, 64], "is [64, 64]: FP8 is served with a scale to every block"),
        ("fmt", "e5m2", "is 'e5m2': of FP8, e4m3"),
        ("activation_scheme", "static", "is 'static': activation-quantised"),
    ],
)
def test_what_fp8_has_and_is_not_served_is_refused_by_its_field(path: str, value: object, message: str):
    assert fault(changed(K2, path, value)).startswith(f"{path} {message}")


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq' (AWQ)"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq' (GPTQ)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' (NVIDIA ModelOpt, NVFP4)"),
        ({"quant_method": "mxfp4"}, "'mxfp4' (MXFP4)"),
        ({"quant_method": "nobody's"}, '"nobody\'s"'),
        ({"quant_method": ["fp8"]}, "['fp8']"),
    ],
)
def test_another_method_is_refused_by_its_name(config: dict[str, Any], names: str):
    told = fault(config)
    assert told.startswith(f"quant_method is {names}")
    assert "which is not served" in told


@pytest.mark.parametrize("config", [{}, {"bits": 4}])
def test_a_configuration_that_names_no_method_is_refused(config: dict[str, Any]):
    assert fault(config).startswith("quant_method is missing")


@pytest.mark.parametrize("config", [[], "fp8", 4])
def test_a_configuration_that_is_no_object_is_refused(config: object):
    assert fault(config).endswith("not an object")


def test_a_fault_inside_the_text_part_is_named_there():
    raw = wrapped_config(dict(KNOWN["kimi-k2.5"].config))
    raw["text_config"]["quantization_config"] = changed(K25, f"{GROUP}.weights.group_size", 64)
    with pytest.raises(ModelError, match=r"^config\.json: text_config\.quantization_config\.config_groups\.group_0\."):
        model_of(raw)


def test_the_models_of_the_hub_are_served_in_their_own_formats():
    for config, stored in ((wrapped_config(dict(KNOWN["kimi-k2.5"].config)), K25), (KNOWN["kimi-k2"].config, K2)):
        model_of({**config, "quantization_config": stored})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weight_zero_point", "an asymmetric format's zero point"),
        ("weight_g_idx", "activation ordering"),
        ("qweight", "GPTQ's or AWQ's"),
        ("weight_scale_2", "NVFP4's"),
        ("weight_global_scale", "NVFP4's"),
        ("input_scale", "activation-quantised"),
        ("absmax", "bitsandbytes'"),
    ],
)
def test_a_tensor_that_only_other_formats_have_is_refused_whatever_the_configuration_says(
    tmp_path: Path, name: str, message: str
):
    config = Checkpoint.open(FIXTURES / "kimi_k2").config
    write_checkpoint(tmp_path, config, {f"model.layers.0.mlp.up_proj.{name}": np.ones(1, np.float32)})
    with pytest.raises(ModelError) as caught:
        check_formats(Checkpoint.open(tmp_path))
    told = str(caught.value)
    assert told.startswith(f"{tmp_path}/model.safetensors: tensor 'model.layers.0.mlp.up_proj.{name}' is ")
    assert message in told


def test_what_the_tower_that_sees_is_stored_in_does_not_matter(tmp_path: Path):
    config = wrapped_config(Checkpoint.open(FIXTURES / "kimi_k2").config)
    tensors = {"vision_tower.wo.input_scale": np.ones(1, np.float32), "language_model.a": np.ones(1, np.float32)}
    write_checkpoint(tmp_path, config, tensors)
    check_formats(Checkpoint.open(tmp_path))
