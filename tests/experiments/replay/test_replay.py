"""The replay against what can be worked out by hand, and files that are no traces."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest, TraceError, read_trace, write_trace
from moonshard.experiments.replay.command import router_replay
from moonshard.experiments.replay.replay import ReplayConfig, replay
from moonshard.experiments.replay.synthetic import agent_trace

LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def a_session(number: int, num_turns: int, gap_ms: float = 1000.0) -> list[TracedRequest]:
    """Each turn is the one before and another block."""
    return [
        TracedRequest(
            turn * gap_ms + number, (turn + 1) * BLOCK_TOKENS, 10, tuple(1000 * number + i for i in range(turn + 1))
        )
        for turn in range(num_turns)
    ]


def sessions(num_sessions: int, num_turns: int) -> list[TracedRequest]:
    found = [request for number in range(num_sessions) for request in a_session(number, num_turns)]
    return sorted(found, key=lambda request: request.timestamp_ms)


def test_the_oracle_finds_all_but_the_last_block_of_every_turn():
    found = replay(sessions(5, 4), ReplayConfig())
    assert found.oracle_hit_rate == pytest.approx((0 + 1 + 2 + 3) / (1 + 2 + 3 + 4))
    assert found.num_requests == 20


def test_cost_keeps_sessions_where_they_are_and_shares_them_out():
    found = replay(sessions(8, 6), ReplayConfig(num_workers=4))
    assert found.hit_rate == found.oracle_hit_rate
    assert found.load_max_over_mean == 1.0


def test_one_worker_is_its_own_oracle_with_any_policy():
    for name in ("cost", "affinity", "round_robin", "random", "least_tokens"):
        found = replay(sessions(4, 4), ReplayConfig(num_workers=1, policy=name))
        assert found.hit_rate == found.oracle_hit_rate
        assert found.load_max_over_mean == 1.0


def test_round_robin_finds_only_what_the_turn_before_last_left():
    found = replay(a_session(0, 8), ReplayConfig(num_workers=2, policy="round_robin"))
    assert found.hit_rate == pytest.approx(sum(range(7)) / sum(range(1, 9)))


def test_a_bounded_cache_forgets_who_came_longest_ago_and_the_end_of_that_first():
    first, second = a_session(0, 4)[-1], a_session(1, 4)[-1]
    later = [
        TracedRequest(at, 4 * BLOCK_TOKENS, 1, one.blocks) for at, one in ((1e6, first), (2e6, second), (3e6, first))
    ]
    bounded = replay(later, ReplayConfig(num_workers=1, blocks_per_worker=6))
    assert bounded.hit_rate == pytest.approx(2 / 12)
    assert bounded.oracle_hit_rate == pytest.approx(4 / 12)


def test_no_device_library_is_imported():
    code = "import sys, moonshard.experiments.replay.command; print({'jax', 'grpc'}.intersection(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_the_command_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps(LINE | {"timestamp": at}) for at in (0, 5, 9)) + "\n\n")
    assert router_replay(tmp_path / "trace.jsonl", workers=2, json_file=tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["hit_rate"] == found["oracle_hit_rate"] == pytest.approx(4 / 6)
    assert found["decisions_per_s"] > 0
    assert "66.67%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timestamp": "now"}, "timestamp is 'now'"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"input_length": 0}, "input_length is 0"),
        ({"output_length": 1.5}, "output_length is 1.5"),
        ({"hash_ids": [0]}, "hash_ids has 1 blocks for 600 tokens"),
        ({"hash_ids": [0, "x"]}, "hash_ids is not a list of numbers"),
        ({"hash_ids": [0, 1 << 64]}, "hash_ids is not a list of numbers below 2^64"),
        ({"hash_ids": [0, True]}, "hash_ids is not a list of numbers"),
        ({"timestamp": 10**400}, "line 2: "),
        ({"timestamp": 1e300}, "timestamp is 1e+300"),
        ({"hash_ids": None}, "hash_ids is not a list of numbers"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number_and_field(tmp_path: Path, change: dict, said: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{json.dumps(LINE | change)}\n")
    with pytest.raises(TraceError, match="line 2: ") as refused:
        read_trace(path)
    assert said in str(refused.value)


def test_a_line_that_is_earlier_than_the_one_above_it_is_refused(tmp_path: Path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(LINE | {"timestamp": stamp}) for stamp in (5, 5, 3)))
    assert router_replay(path) == 2
    assert f"{path}, line 3: timestamp 3 after a later one" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "7", "\xff"])
def test_a_line_that_is_no_object_is_refused_with_its_number(tmp_path: Path, capsys, text: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert router_replay(path) == 2
    assert f"{path}, line 1: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "--workers 0: expected at least 1"),
        ({"blocks_per_worker": 0}, "--blocks-per-worker 0: expected at least 1"),
        ({"tokens_per_s": float("nan")}, "--tokens-per-s nan: expected a number above 0"),
        ({"tokens_per_s": 0.0}, "--tokens-per-s 0: expected a number above 0"),
        ({"queue_weight": -1.0}, "--queue-weight -1: expected a number from 0 on"),
        ({}, "No such file"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path: Path, capsys, options: dict, said: str):
    assert router_replay(tmp_path / "none.jsonl", **options) == 2
    assert said in capsys.readouterr().err


def test_an_empty_trace_is_refused(tmp_path: Path, capsys):
    (tmp_path / "trace.jsonl").write_text("\n")
    assert router_replay(tmp_path / "trace.jsonl") == 2
    assert "the trace has no requests" in capsys.readouterr().err


def test_a_trace_that_was_written_is_read_as_it_was(tmp_path: Path):
    requests = agent_trace(3, num_turns=4)
    write_trace(tmp_path / "trace.jsonl", requests)
    assert read_trace(tmp_path / "trace.jsonl") == [
        replace(one, timestamp_ms=round(one.timestamp_ms)) for one in requests
    ]
