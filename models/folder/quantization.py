"""What a folder says of its number format: read for nothing but to refuse by name what is not served.

Which format a tensor is in, its own presence decides (`models.formats`). What config.json says is true of what was
meant, and tells apart formats whose tensors look alike.
Sources: the configurations of compressed-tensors (`QuantizationConfig`, `QuantizationArgs`), of DeepSeek-V3's FP8, and
of transformers' quantisers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.config_reader import ConfigReader
from moonshard.models.folder.text_part import TEXT_CONFIG, text_part
from moonshard.models.formats.fp8 import FP8
from moonshard.models.formats.int4 import INT4
from moonshard.models.spec import ModelError, WeightFormat

CONFIG_FIELDS = ("quantization_config", "compression_config")  # the latter of an older compressed-tensors
BLOCK, GROUP = [FP8.rows, FP8.columns], INT4.columns
SERVED = "served: compressed-tensors' INT4 and INT8 weights, and FP8 by blocks of 128 x 128"
OTHER_METHODS = {  # as transformers, vLLM and SGLang spell them
    "awq": "AWQ",
    "gptq": "GPTQ",
    "gptq_marlin": "GPTQ",
    "auto-round": "AutoRound",
    "bitsandbytes": "bitsandbytes",
    "bitblas": "BitBLAS",
    "bitnet": "BitNet",
    "modelopt": "NVIDIA ModelOpt",
    "modelopt_fp4": "NVFP4 of NVIDIA ModelOpt",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "fbgemm_fp8": "FP8 with a scale to a row",
    "torchao": "torchao",
    "quark": "AMD Quark",
    "quanto": "Quanto",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "fp_quant": "FP-Quant",
    "compressed_tensors": "compressed-tensors in another spelling",
}
LAYOUTS = {"pack-quantized": (4, "group"), "int-quantized": (8, "channel"), "naive-quantized": (8, "channel")}
OTHER_LAYOUTS = {
    "float-quantized": "FP8 of compressed-tensors",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp8-quantized": "MXFP8",
    "marlin-24": "sparse INT4",
    "sparse-bitmask": "sparse weights",
    "sparse-24-bitmask": "sparse weights",
}
# Tensors that only formats have that are not served, by the last part of their name.
OTHER_TENSORS = {
    "weight_zero_point": "an asymmetric format's zero point",
    "weight_g_idx": "a format's with activation ordering (actorder)",
    "g_idx": "GPTQ's",
    "qweight": "GPTQ's or AWQ's",
    "qzeros": "GPTQ's or AWQ's",
    "weight_scale_2": "NVFP4's or FP8's of NVIDIA ModelOpt",
    "weight_global_scale": "NVFP4's of compressed-tensors",
    "input_global_scale": "an activation-quantised format's",
    "input_scale": "an activation-quantised format's",
    "activation_scale": "an activation-quantised format's",
    "absmax": "bitsandbytes'",
    "quant_map": "bitsandbytes'",
    "SCB": "bitsandbytes'",
}


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ModelError, naming the field of config.json, where it says that weights are in a format not served."""
    for told in _told(config):
        _check_method(told)


def format_meant(config: Mapping[str, Any]) -> WeightFormat:
    """What a config.json without tensors beside it says of the format that most of them have: where some are INT4,
    experts, of which a model mostly is. ModelError of one that is not served.
    """
    check_config(config)
    bits = set[Any]()
    for told in _told(config):
        if told.get("quant_method") == "fp8":
            return "fp8"
        groups = told.inside("config_groups")
        own = [group.inside("weights") for group in map(groups.inside, groups.names()) if group.get("weights")]
        bits |= {weights.get("num_bits") for weights in own}
    return "int4-experts" if 4 in bits else "int8" if 8 in bits else "bf16"


def _told(config: Mapping[str, Any]) -> Iterator[ConfigReader]:
    """What is said of quantisation, of the whole and of its text part."""
    text = config.get(TEXT_CONFIG)
    for at, part in (("", config), (f"{TEXT_CONFIG}.", text if isinstance(text, Mapping) else {})):
        for name in CONFIG_FIELDS:
            if part.get(name) is not None:
                yield ConfigReader(part, at).inside(name)


def check_tensors(text: Checkpoint) -> None:
    """Raises ModelError, naming a tensor and its file, where one is a part of a format that is not served."""
    for name in text.names:
        if (what := OTHER_TENSORS.get(name.rpartition(".")[2])) is not None:
            raise ModelError(f"{text.where(name)} is {what}, which is not served ({SERVED})")


def check_formats(folder: Checkpoint) -> None:
    """Both, of a whole folder, without jax. The message names the file."""
    try:
        check_config(folder.config)
    except ModelError as error:
        raise ModelError(f"{folder.folder}/{error}") from error
    check_tensors(text_part(folder))


def _check_method(fields: ConfigReader) -> None:
    method = fields.get("quant_method")
    if method is None and fields.get("config_groups") is not None:
        method = "compressed-tensors"  # which older folders do not name
    if method == "fp8":
        _check_fp8(fields)
    elif method == "compressed-tensors":
        _check_compressed_tensors(fields)
    else:
        known = OTHER_METHODS.get(method) if isinstance(method, str) else None
        algorithm = fields.get("quant_algo")
        told = [text for text in (known, algorithm if isinstance(algorithm, str) else None) if text]
        is_what = "is missing" if method is None else f"is {method!r}" + (f" ({', '.join(told)})" if told else "")
        raise fields.fault(f"quant_method {is_what}, which is not served ({SERVED})")


def _check_fp8(fields: ConfigReader) -> None:
    fields.demand("fmt", lambda value: value in (None, "e4m3"), "of FP8, e4m3 is served")
    blocks = "FP8 is served with a scale to every block of [128, 128]"
    fields.demand("weight_block_size", lambda value: value == BLOCK, f"{blocks}, not to a tensor or to other blocks")
    dynamic = "activation-quantised with scales of the folder's; dynamic is served, whose weights stand by themselves"
    fields.demand("activation_scheme", lambda value: value in (None, "dynamic"), dynamic)


def _check_compressed_tensors(fields: ConfigReader) -> None:
    fields.demand("transform_config", lambda value: not value, "weights that are rotated or transformed are not served")
    sparsity = fields.get("sparsity_config")
    if sparsity:
        told = "sparse weights are not served"
        fields.inside("sparsity_config").demand("format", lambda value: value in (None, "dense"), told)
    groups = fields.inside("config_groups")
    for name in groups.names():
        group = groups.inside(name)
        layout_of = group if group.get("format") is not None else fields
        _check_group(group, layout_of)


def _check_group(group: ConfigReader, layout_of: ConfigReader) -> None:
    """Checks what a group of layers has in common; `layout_of` names the layout: the group, or all of them."""
    for name in ("input_activations", "output_activations"):
        group.demand(name, lambda value: value is None, "activation-quantised layers are not served, weights alone are")
    if group.get("weights") is None:
        return
    layout = layout_of.get("format")
    if not isinstance(layout, str) or layout not in LAYOUTS:
        known = f" ({OTHER_LAYOUTS[layout]})" if isinstance(layout, str) and layout in OTHER_LAYOUTS else ""
        is_what = "is missing" if layout is None else f"is {layout!r}{known}"
        raise layout_of.fault(f"format {is_what}, which is not served (served: {', '.join(LAYOUTS)})")
    num_bits, strategy = LAYOUTS[layout]
    weights = group.inside("weights")
    weights.demand("type", lambda value: value in (None, "int"), f"with {layout}, int is served")
    weights.demand("num_bits", lambda value: value == num_bits, f"with {layout}, {num_bits} bits are served")
    weights.demand("symmetric", lambda value: value in (None, True), "asymmetric weights are not served")
    weights.demand("strategy", lambda value: value == strategy, f"with {layout}, {strategy} is served")
    if strategy == "group":
        weights.demand("group_size", lambda value: value == GROUP, f"groups of {GROUP} are served")
    weights.demand("dynamic", lambda value: value in (None, False), "weights without stored scales are not served")
    ordering = "activation ordering permutes a row's groups, which is not served"
    weights.demand("actorder", lambda value: value in (None, False, "weight", "static"), ordering)
