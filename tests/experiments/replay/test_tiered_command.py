"""What the command says of tiers and of made-up agents, and what it refuses."""

import json
from pathlib import Path

import pytest

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest, write_trace
from moonshard.experiments.replay.command import router_replay
from moonshard.experiments.replay.replay import ReplayConfig
from moonshard.experiments.replay.synthetic import coding_agent_trace
from moonshard.experiments.replay.tiered import TieredConfig, replay_tiered
from moonshard.experiments.replay.tiers import tier_of


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two prompts of four blocks, and the first one again."""
    prompts = [range(4), range(10, 14), range(4)]
    requests = [TracedRequest(1e4 * number, 4 * BLOCK_TOKENS, 1, tuple(each)) for number, each in enumerate(prompts)]
    write_trace(tmp_path / "trace.jsonl", requests)
    return tmp_path / "trace.jsonl"


def test_policies_are_compared_in_a_table(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    code = router_replay(
        trace,
        workers=1,
        blocks_per_worker=4,
        tiers=("host:8:1:0", "ssd:8:s3_fifo"),
        retention=("lru", "hit_density"),
        block_bytes=10**12,
        json_file=out,
    )
    assert code == 0
    header, _, lru, hit_density = capsys.readouterr().out.splitlines()
    assert header.startswith(
        "| retention | found again | device | host | ssd | one unbounded cache | up, TB | down, TB |"
    )
    assert lru.startswith("| lru | 33.33% | 0.00% | 33.33% | 0.00% | 33.33% | 4.00 | 16.00 | 0.34, 0.34, 0.34 |")
    assert hit_density.startswith("| hit_density | 33.33% |")
    written = json.loads(out.read_text())
    assert written["hit_density"]["config"]["tiers"][0]["retention"] == "hit_density"
    assert written["hit_density"]["config"]["tiers"][1]["retention"] == "s3_fifo"
    assert [run["hit_rate"] for run in written["lru"]["runs"]] == pytest.approx([1 / 3])


def test_figures_are_means_over_the_seeds(capsys: pytest.CaptureFixture[str]):
    assert router_replay(agents=4, seed=(1, 2), workers=2, blocks_per_worker=30, tiers=("host:50",)) == 0
    (*_, row) = capsys.readouterr().out.splitlines()
    routing = ReplayConfig(num_workers=2, blocks_per_worker=30)
    config = TieredConfig(routing=routing, tiers=(tier_of("host:50"),))
    found = [replay_tiered(coding_agent_trace(4, seed=seed), config) for seed in (1, 2)]
    assert found[0].hit_rate != found[1].hit_rate
    assert row.startswith(f"| lru | {sum(run.hit_rate for run in found) / 2:.2%} | ")
    assert f" | {sum(run.ttft.p50_s for run in found) / 2:.2f}, " in row


def test_made_up_agents_need_no_trace(capsys: pytest.CaptureFixture[str]):
    assert router_replay(agents=4) == 0
    plain = capsys.readouterr().out
    assert plain.startswith(f"{len(coding_agent_trace(4)):,} requests, 8 workers")
    assert router_replay(agents=4, seed=(5,)) == 0
    assert capsys.readouterr().out.startswith(f"{len(coding_agent_trace(4, seed=5)):,} requests, 8 workers")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--trace, --agents: expected one of them"),
        ({"trace": Path("x"), "agents": 3}, "--trace, --agents: expected one of them"),
        ({"agents": 0}, "--agents 0: expected at least 1"),
        ({"trace": Path("x"), "seed": (1,)}, "--seed: expected --agents"),
        ({"agents": 3, "seed": (1, 2)}, "--seed 1 2: expected one, or --tiers"),
        ({"agents": 3, "retention": ("lru",)}, "--retention: expected --tiers"),
        ({"agents": 3, "block_bytes": 5}, "--block-bytes: expected --tiers"),
        ({"agents": 3, "block_bytes": 0}, "--block-bytes 0: expected at least 1"),
        ({"agents": 3, "tiers": ("host:5",)}, "--tiers: expected --blocks-per-worker"),
        ({"agents": 3, "blocks_per_worker": 3, "tiers": ("hots:5",)}, "--tiers hots:5: 'hots' is none of host"),
        (
            {"agents": 3, "blocks_per_worker": 3, "tiers": ("ssd:5", "ssd:6")},
            "--tiers ssd:5 ssd:6: expected each name once",
        ),
    ],
)
def test_options_that_cannot_be_meant_are_refused(capsys: pytest.CaptureFixture[str], options: dict, said: str):
    assert router_replay(**options) == 2
    assert f"moonshard router-replay: {said}" in capsys.readouterr().err


def test_a_trace_without_full_blocks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_trace(tmp_path / "trace.jsonl", [TracedRequest(0.0, 10, 1, (1,))])
    assert router_replay(tmp_path / "trace.jsonl", blocks_per_worker=4, tiers=("host:5",)) == 2
    assert "no requests of a full block" in capsys.readouterr().err
