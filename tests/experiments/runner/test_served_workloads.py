"""Workloads on a real server: what is the same in a trace is found in its cache, words are its tokenizer's tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.command import Run, experiment
from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.reading.child import run_experiment
from moonshard.experiments.reading.tables.run_tables import load_runs
from tests.sizes import EXPERIMENT

MODEL = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
SERVER = f"""
warmup_requests = 1
[server]
mode = "aggregated"
model.path = "{MODEL}"
{EXPERIMENT}
worker.prepare = "needed"
"""
FIXED = """
[workload]
kind = "fixed"
prompt_tokens = 20
output_tokens = 4
num_requests = 4
"""

pytestmark = pytest.mark.xdist_group("cluster")


def requests_of(tmp_path: Path, workload: str, lines: Sequence[object]) -> pl.DataFrame:
    (tmp_path / "config.toml").write_text(f'{SERVER}[workload]\npath = "lines.jsonl"\n{workload}')
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return load_runs(run_experiment(tmp_path, out=tmp_path / "results")).requests.sort("request_index")


@pytest.mark.timeout(300)
def test_blocks_of_equal_number_are_found_in_the_cache_where_all_before_them_are_equal_too(tmp_path: Path):
    """A block of 512 tokens becomes one of 32 here, which the server keeps as two of its own."""
    prompts = {
        "new": ([0, 1], 1024),
        "begins alike": ([0, 2], 1024),
        "has nothing in common": ([3, 4], 1024),
        "is the same": ([0, 1], 1024),
        "has a known block elsewhere": ([3, 0], 1024),
        "has a known block behind a new one": ([5, 0], 1024),
        "is the beginning of one": ([0], 256),
        "is longer": ([0, 1, 6], 1104),
    }
    lines = [
        {"timestamp": 700 * n, "input_length": size, "output_length": 64, "hash_ids": blocks}
        for n, (blocks, size) in enumerate(prompts.values())
    ]
    found = requests_of(tmp_path, 'kind = "trace"\nlength_scale = 0.0625\n', lines)
    assert set(found["outcome"]) == {"completed"}
    assert found["prompt_tokens"].to_list() == [size // 16 for _, size in prompts.values()]
    assert found["completion_tokens"].to_list() == [4] * len(lines)
    cached = dict(zip(prompts, found["cached_tokens"], strict=True))
    assert cached == dict(zip(prompts, [0, 32, 0, 63, 32, 0, 15, 64], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_texts_and_chats_are_sent_as_the_models_tokens(tmp_path: Path):
    chat = [{"role": "user", "content": "The moon is bright."}]
    lines = [
        {"prompt": "The moon is bright.", "max_tokens": 3},
        {"messages": chat, "max_tokens": 2},
        {"prompt": [1, 2, 3], "max_tokens": 1},
    ]
    found = requests_of(tmp_path, 'kind = "prompts"\n', lines)
    assert set(found["outcome"]) == {"completed"}
    assert (found["prompt_tokens"] == found["planned_prompt_tokens"]).all()
    text, chatted, ids = found["prompt_tokens"].to_list()
    assert (0 < text < chatted, ids) == (True, 3)
    assert found["completion_tokens"].to_list() == [3, 2, 1]


@pytest.mark.timeout(300)
def test_ids_that_the_served_model_has_not_are_refused_with_their_line(tmp_path: Path, capsys):
    (tmp_path / "config.toml").write_text(f'{SERVER}[workload]\nkind = "prompts"\npath = "lines.jsonl"\n')
    (tmp_path / "lines.jsonl").write_text('{"prompt": [1], "max_tokens": 1}\n{"prompt": [999999], "max_tokens": 1}')
    assert experiment(Run(folder=tmp_path, out=tmp_path / "results")) == 2
    assert "lines.jsonl, line 2: id 999999 of a model that has" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_whose_server_lost_what_it_recorded_is_not_done(tmp_path: Path):
    """It may keep one file of one row, as if its disk had taken no more."""
    (tmp_path / "config.toml").write_text(f"{SERVER}trace = {{ max_rows = 1, max_bytes = 1 }}\n{FIXED}")
    with pytest.raises(ExperimentError, match="point-000-repeat-0: the server's recording lacks 3 of 4 requests: see"):
        run_experiment(tmp_path, out=tmp_path / "results")
    (run,) = (tmp_path / "results" / tmp_path.name).iterdir()
    assert (run / "point-000-repeat-0.incomplete" / "requests.parquet").is_file()
