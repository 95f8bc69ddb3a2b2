"""Reading config.json: both spellings give one configuration, and a faulty field is named."""

import json

import pytest

from moonshard.models.folder.config_reader import Yarn
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.spec import ModelError
from tests.agreement import FIXTURES

RAW = json.loads((FIXTURES / "kimi_k2" / "config.json").read_text())
GROUPS = json.loads((FIXTURES / "dsv3_groups" / "config.json").read_text())
REQUIRED = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
]


def read(raw=RAW, **changes) -> KimiConfig:
    return KimiConfig.from_hugging_face({**raw, **changes})


SIZES = [field for field, declared in KimiConfig.__dataclass_fields__.items() if declared.type in (int, int | None)]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [10**10, 10**1000])
def test_a_size_without_end_is_refused_by_name_before_anything_is_made_of_it(field: str, value: int):
    with pytest.raises(ModelError, match=rf"^config\.json: {field} is .{{1,40}}, more than \d+$"):
        read(**{field: value})


def test_experts_are_bounded_over_all_layers_too():
    with pytest.raises(ModelError, match="n_routed_experts = 65536 makes more than 1048576 in all layers"):
        read(num_hidden_layers=4096, n_routed_experts=65_536)


def test_the_largest_models_there_are_are_within_the_bounds():
    k2 = read(num_hidden_layers=61, n_routed_experts=384, vocab_size=163_840, max_position_embeddings=262_144)
    assert k2.num_hidden_layers == 61
    assert read(max_position_embeddings=10_485_760).max_position_embeddings == 10_485_760


@pytest.mark.parametrize("field", REQUIRED)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_field_is_named(field, how):
    raw = {name: value for name, value in RAW.items() if name != field}
    if how == "null":
        raw[field] = None
    with pytest.raises(ModelError, match=rf"config\.json: {field} is missing"):
        KimiConfig.from_hugging_face(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", "2048"),
        ("hidden_size", 128.5),
        ("num_hidden_layers", 0),
        ("num_attention_heads", -4),
        ("n_routed_experts", True),
        ("q_lora_rank", "48"),
        ("q_lora_rank", False),
        ("n_shared_experts", -1),
        ("first_k_dense_replace", [1]),
        ("norm_topk_prob", 1),
        ("attention_bias", "no"),
        ("tie_word_embeddings", 0),
        ("routed_scaling_factor", "2.8"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", False),
        ("rope_scaling", "yarn"),
        ("rope_scaling", [1]),
    ],
)
def test_an_ill_typed_field_is_named(field, value):
    with pytest.raises(ModelError, match=field):
        read(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("model_type", "llama", "deepseek_v3, kimi_k2"),
        ("model_type", ["kimi_k2"], "kimi_k2"),
        ("hidden_act", "gelu", "silu"),
        ("scoring_func", "softmax", "sigmoid"),
    ],
)
def test_an_unsupported_choice_is_named_with_what_is_known(field, value, known):
    with pytest.raises(ModelError, match=rf"{field} is .*{known}"):
        read(**{field: value})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": "linear"}, "rope_scaling.type"),
        ({"factor": None}, "factor"),
        ({"factor": "32"}, "factor"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"beta_fast": "fast"}, "beta_fast"),
        ({"beta_slow": False}, "beta_slow"),
        ({"mscale": [1]}, "mscale"),
        ({"truncate": "yes"}, "truncate"),
    ],
)
def test_a_faulty_field_inside_rope_scaling_is_named(change, field):
    with pytest.raises(ModelError, match=field):
        read(rope_scaling={**RAW["rope_scaling"], **change})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"n_group": 16, "topk_group": 8}, "n_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
    ],
)
def test_fields_that_do_not_fit_together_are_named(changes, field):
    with pytest.raises(ModelError, match=rf"config\.json: {field} = "):
        read(GROUPS, **changes)


def test_transformers_4_and_5_spell_the_same_configuration():
    new = {name: value for name, value in RAW.items() if name not in ("rope_scaling", "rope_theta", "torch_dtype")}
    rope = {name: value for name, value in RAW["rope_scaling"].items() if name != "type"}
    new["rope_parameters"] = {**rope, "rope_type": "yarn", "rope_theta": RAW["rope_theta"]}
    assert KimiConfig.from_hugging_face(new) == read()
    assert KimiConfig.from_hugging_face({**new, "model_type": "kimi_k2"}) == read()
    assert read().rope_theta == 50000.0


def test_every_field_is_read_from_its_own_name():
    config = read(GROUPS)
    same_names = set(GROUPS) & set(KimiConfig.__dataclass_fields__)
    assert len(same_names) >= 23
    assert {name: getattr(config, name) for name in same_names} == {name: GROUPS[name] for name in same_names}
    assert config.yarn == Yarn(
        factor=40.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )


def test_no_rope_scaling_means_no_yarn():
    assert read(rope_scaling=None).yarn is None
    assert read(rope_scaling={"rope_type": "default", "rope_theta": 7.0}).yarn is None
    assert read(rope_scaling={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0


def test_the_norms_inside_the_low_rank_projections_do_not_follow_rms_norm_eps():
    assert read(rms_norm_eps=1e-5).lora_norm_eps == 1e-6
    assert read(lora_norm_eps=1e-5).lora_norm_eps == 1e-5


def test_optional_parts_may_be_absent():
    config = read(q_lora_rank=None, n_shared_experts=0, first_k_dense_replace=0)
    assert (config.q_lora_rank, config.n_shared_experts, config.num_dense_layers) == (None, 0, 0)
    assert read(first_k_dense_replace=99).num_moe_layers == 0
