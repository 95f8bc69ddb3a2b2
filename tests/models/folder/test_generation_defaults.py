"""The folder's own defaults: stop tokens from both files, nothing guessed, faults with names."""

import json
from pathlib import Path

import pytest

from moonshard.models.folder.generation import GenerationConfigError, GenerationDefaults, load_generation_defaults

FIXTURES = Path(__file__).parents[2] / "fixtures"


def defaults(folder: Path, **files: object) -> GenerationDefaults:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_generation_defaults(folder)


def test_kimi_stops_on_the_tokens_of_both_files():
    found = load_generation_defaults(FIXTURES / "kimi_k2")
    assert found == GenerationDefaults(stop_token_ids=frozenset({2017, 2018}), temperature=0.6, top_p=0.95)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": 2}, {1, 2}),
        ({"eos_token_id": [1, 3]}, {"text_config": {"eos_token_id": 4}}, {1, 3, 4}),
        ({}, {"eos_token_id": 2, "text_config": {"eos_token_id": [5, 5]}}, {2, 5}),
        ({"eos_token_id": None}, {}, set()),
    ],
)
def test_stop_tokens_are_the_union_of_all_places(
    tmp_path: Path, generation: dict[str, object], config: dict[str, object], expected: set[int]
):
    assert defaults(tmp_path, generation_config=generation, config=config).stop_token_ids == expected


def test_a_folder_without_files_says_nothing(tmp_path: Path):
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_a_folder_that_does_not_sample_is_greedy_whatever_else_it_says(tmp_path: Path):
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1}
    found = defaults(tmp_path, generation_config=sampling)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.9, 40, 0.1)
    found = defaults(tmp_path, generation_config={"do_sample": False, **sampling})
    assert found == GenerationDefaults(temperature=0.0, repetition_penalty=1.1)


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("value", ["x", -1, True, [1, "2"], 1.5, {}])
def test_a_stop_token_that_is_none_is_refused(tmp_path: Path, name: str, value: object):
    with pytest.raises(GenerationConfigError, match=rf"{name}\.json: eos_token_id"):
        defaults(tmp_path, **{name: {"eos_token_id": value}})


@pytest.mark.parametrize("value", ["0.6", True, float("nan"), [1]])
def test_a_temperature_that_is_no_number_is_refused(tmp_path: Path, value: object):
    with pytest.raises(GenerationConfigError, match=r"generation_config\.json: temperature"):
        defaults(tmp_path, generation_config={"temperature": value})


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes):
    (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(GenerationConfigError, match=f"{name}.json"):
        load_generation_defaults(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.1), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0)],
)
def test_a_default_that_no_client_could_ask_for_is_refused_by_name(tmp_path, field, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(GenerationConfigError, match=rf"generation_config.json: {field} is {value!r}, out of range"):
        load_generation_defaults(tmp_path)
