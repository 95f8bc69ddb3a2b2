"""Each kind of workload is made of its table, fits the model that is served, and has other requests in each repeat."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.workload.options import (
    KINDS,
    FixedOptions,
    PromptOptions,
    RelativeOptions,
    check_workload,
    digest_of,
    plan,
    read_workload,
    with_shifted_seed,
)
from moonshard.experiments.workload.plan import Workload, WorkloadError
from moonshard.rpc.types import ModelInfo

MODEL = ModelInfo(
    model="m", max_context_tokens=700, vocab_size=8192, stop_token_ids=(), has_tokenizer=True, dtype="float32",
    fingerprint="f", version="0",
)  # fmt: skip
LINES: dict[str, list[dict[str, Any]]] = {
    "trace": [
        {"timestamp": 3000 * i, "input_length": 600, "output_length": 5 + i, "hash_ids": [0, i]} for i in range(4)
    ],
    "prompts": [{"prompt": [1, 2, 3], "max_tokens": 4}, {"prompt": [5] * 690, "max_tokens": 4, "at_s": 1}],
}
FEW = {"num_requests": 3, "rate_per_s": 2}
TABLES: dict[str, dict[str, Any]] = {
    "trace": {"max_requests": 3, "time_scale": 0.1},
    "fixed": {"prompt_tokens": 600, "output_tokens": 9, **FEW},
    "relative": {"prompt_tokens": 600, "output_tokens": 9, "times_capacity": 0.5, "lasts_s": 3},
    "mixed": {
        "prompt_tokens": [600, 5],
        "output_tokens": [9, 8],
        "weights": [1, 1],
        "num_requests": 3,
        "rate_per_s": 2,
    },
    "sessions": {"num_sessions": 2, "session_tokens": 300, "max_tokens": 4},
    "prompts": {},
}


def table_of(kind: str, folder: Path, **changes: Any) -> dict[str, Any]:
    table = {"kind": kind, **TABLES[kind], **changes}
    if kind in LINES:
        (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, LINES[kind])))
        table["path"] = str(folder / "lines.jsonl")
    return table


def options_of(kind: str, folder: Path, **changes: Any):
    faults: list[str] = []
    options = read_workload(table_of(kind, folder, **changes), faults)
    assert options is not None, faults
    return options


def planned(kind: str, folder: Path, model: ModelInfo = MODEL, *, shift: int = 0, **changes: Any) -> Workload:
    """A load that is told by a capacity, at one of 2 requests a second."""
    options = options_of(kind, folder, **changes)
    if isinstance(options, RelativeOptions):
        options = options.at(capacity_per_s=2.0)
    return plan(with_shifted_seed(options, shift), model)


def times(workload: Workload) -> list[float | None]:
    return [request.at_s for request in workload.requests]


def prompts(workload: Workload) -> list[list[int]]:
    return [request.prompt.tokens() for request in workload.requests]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_made_of_its_table(kind: str, tmp_path: Path):
    workload = planned(kind, tmp_path)
    assert len(workload.requests) >= 2
    assert prompts(planned(kind, tmp_path)) == prompts(workload)
    again = prompts(planned(kind, tmp_path, shift=1))
    assert (again == prompts(workload)) == (kind == "prompts")
    assert all(0 <= token < MODEL.vocab_size for prompt in again for token in prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_longer_than_the_context_is_refused_with_its_place(kind: str, tmp_path: Path):
    changes = {"session_tokens": 900} if kind == "sessions" else {}
    short = replace(MODEL, max_context_tokens=600)
    with pytest.raises(WorkloadError, match=r"(request|session|line) \d+.* context of 600"):
        planned(kind, tmp_path, short, **changes)


@pytest.mark.parametrize("kind", ["trace", "prompts"])
def test_what_is_longer_is_cut_and_counted_where_that_is_said(kind: str, tmp_path: Path):
    short = replace(MODEL, max_context_tokens=602)
    workload = plan(options_of(kind, tmp_path, clips=True), short)
    assert workload.num_clipped == (3 if kind == "trace" else 1)
    assert max(len(one.prompt) + one.max_tokens for one in workload.requests) == 602


def test_a_load_told_by_a_capacity_is_that_many_times_as_fast_and_lasts_as_long(tmp_path: Path):
    options = options_of("relative", tmp_path, times_capacity=3, lasts_s=12, interval_cv=0, seed=5)
    assert isinstance(options, RelativeOptions)
    fixed = FixedOptions(
        kind="fixed", prompt_tokens=600, output_tokens=9, num_requests=90, rate_per_s=7.5, interval_cv=0, seed=5
    )
    assert options.at(capacity_per_s=2.5) == fixed
    assert options.at(capacity_per_s=1e-9).num_requests == 1
    with pytest.raises(WorkloadError, match="first point, which was not measured"):
        plan(options, MODEL)


def test_sessions_need_the_tokens_of_the_embedded_model(tmp_path: Path):
    small = replace(MODEL, vocab_size=100)
    with pytest.raises(WorkloadError, match="tokens of the embedded model"):
        plan(options_of("sessions", tmp_path), small)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sessions"])
def test_what_is_too_long_is_refused_before_a_server_is_there_where_its_context_is_known(kind: str, tmp_path: Path):
    options = options_of(kind, tmp_path)
    check_workload(options, None)
    check_workload(options, 700)
    with pytest.raises(ExperimentError, match=r"(request|line) \d+: .* context of 604"):
        check_workload(options, 604)


def test_a_trace_is_spread_over_its_bins_where_it_has_any_or_as_far_as_it_says(tmp_path: Path):
    binned, told = options_of("trace", tmp_path), options_of("trace", tmp_path, jitter_s=0.5)
    assert [0 < (at_s or 0) / 0.1 - 3 * n < 3 for n, at_s in enumerate(times(plan(binned, MODEL)))] == [True] * 3
    assert [0 < (at_s or 0) / 0.1 - 3 * n < 0.5 for n, at_s in enumerate(times(plan(told, MODEL)))] == [True] * 3
    exact = [{**LINES["trace"][0], "timestamp": stamp} for stamp in (0, 1500, 3000)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, exact)))
    assert times(plan(binned, MODEL)) == pytest.approx([0.0, 0.15, 0.3])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("trace", name) for name in ("time_scale", "length_scale", "jitter_s")),
        *(("fixed", name) for name in ("rate_per_s", "interval_cv")),
        *(("relative", name) for name in ("times_capacity", "lasts_s", "interval_cv")),
        *(("mixed", name) for name in ("rate_per_s", "interval_cv")),
        ("sessions", "mean_think_s"),
    ],
)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e200])
def test_what_no_clock_and_no_machine_holds_is_refused_by_its_name(kind: str, name: str, value: float, tmp_path: Path):
    faults: list[str] = []
    read_workload(table_of(kind, tmp_path, **{name: value}), faults)
    assert [fault.split(":")[0] for fault in faults] == [f"workload.{name}"]


def test_a_digest_is_of_what_the_file_holds(tmp_path: Path):
    options = options_of("prompts", tmp_path)
    assert isinstance(options, PromptOptions)
    before = digest_of(options)
    (tmp_path / "moved.jsonl").write_bytes(options.path.read_bytes())
    assert digest_of(replace(options, path=tmp_path / "moved.jsonl")) == before
    options.path.write_text(options.path.read_text() + "\n")
    assert before != digest_of(options) != {}
    assert digest_of(options_of("fixed", tmp_path)) == {}
