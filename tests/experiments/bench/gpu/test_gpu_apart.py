"""Two engines on one device give the tokens of one, every request is answered, and what is not is told."""

import asyncio
from random import Random

import jax
import numpy as np
import pytest

from moonshard.experiments.bench.gpu.scale import quick, trial_scale
from moonshard.experiments.bench.gpu.serving import clients as gpu_clients
from moonshard.experiments.bench.gpu.serving.apart import APART, Apart
from moonshard.experiments.bench.gpu.serving.apart_checks import check_alone, check_recorded, recorded_pair
from moonshard.experiments.bench.gpu.serving.clients import Stuck, serve
from moonshard.experiments.bench.gpu.serving.engines import Receiver, build_pair, ignore
from moonshard.experiments.bench.gpu.serving.mix import (
    Mix,
    ServingPlan,
    arms,
    draw_requests,
    measure_arms,
    measure_capacity,
)
from moonshard.experiments.bench.gpu.serving.steps import StepRows
from moonshard.experiments.bench.gpu.slice import DTYPE, draw_weights
from moonshard.models.experts import moe
from tests.agreement import FIXTURES
from tests.compiled import compiled_once

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
MIX = Mix(prompt_tokens=(40, 7), output_tokens=(3, 9), num_requests=(2, 5))


@compiled_once
def recorded():
    return recorded_pair(FIXTURES, moe.blocks)


def errors() -> list[float]:
    return [check.error for check in check_recorded(FIXTURES, recorded())]


@pytest.mark.slow
def test_one_engine_and_two_give_the_recorded_tokens_with_many_at_once():
    assert errors() == [0, 0]


def lose_what_lands(monkeypatch) -> None:
    launch = Receiver.launch

    def zeroed(self, step):
        if step.payload is not None:
            ticket = int(step.payload[0])
            self.way.blocks[ticket] = self.way.blocks[ticket] * 0
        return launch(self, step)

    monkeypatch.setattr(Receiver, "launch", zeroed)


def test_blocks_that_arrive_changed_do_not_pass(monkeypatch):
    lose_what_lands(monkeypatch)
    both, apart = errors()
    assert both == 0
    assert apart > 0


def test_blocks_that_leave_too_late_do_not_pass(monkeypatch):
    """Once all prompts are prefilled: by then others have written most blocks anew."""
    export, prefilled, plans = Apart._export, Apart._prefilled, []

    def export_all_at_last(self, report):
        prefilled(self, report)
        if all(leg.first_token is not None for leg in self._legs.values()):
            for plan in plans:
                export(self, plan)
            plans.clear()

    monkeypatch.setattr(Apart, "_export", lambda self, plan: plans.append(plan))
    monkeypatch.setattr(Apart, "_prefilled", export_all_at_last)
    both, apart = errors()
    assert both == 0
    assert apart > 1


def test_a_handoff_that_never_lands_is_told(monkeypatch):
    monkeypatch.setattr(Apart, "_land", lambda self, leg, fresh, tickets: None)
    monkeypatch.setattr(gpu_clients, "MAX_RUN_S", 0.5)
    requests = draw_requests(MIX, recorded().vocab_size, Random(1))
    with pytest.raises(Stuck, match="7 of 7 requests"):
        asyncio.run(serve(arms(recorded())[APART](ignore), [(0.0, request) for request in requests]))


def test_what_fails_an_engine_ends_the_run(monkeypatch):
    def broken(self, step):
        raise RuntimeError("no such block")

    monkeypatch.setattr(Receiver, "launch", broken)
    with pytest.raises(RuntimeError, match="no such block"):
        errors()


@pytest.mark.slow
def test_the_slice_alone_gives_the_same_tokens_from_both_and_they_hang_on_its_kv(monkeypatch):
    """Its weights are on the device once, however many engines there are."""
    scale = quick(trial_scale(1))
    loaded = draw_weights(scale.sizes.model, seed=3)
    num_before = num_like(loaded.experts)
    pair = build_pair(scale.sizes.model, loaded, scale.serving.sizes, moe.blocks, DTYPE)
    assert num_like(loaded.experts) == num_before
    assert check_alone(pair, scale.serving.mix, seed=5).passed
    lose_what_lands(monkeypatch)
    assert not check_alone(pair, scale.serving.mix, seed=5).passed


def num_like(experts: moe.Experts[jax.Array] | None) -> int:
    """Arrays of this shape on the devices."""
    assert experts is not None
    return sum(array.shape == experts.gate_up.shape for array in jax.live_arrays())


def test_every_arm_answers_every_request_whole_and_tells_of_its_steps():
    pair, steps = recorded(), StepRows()
    assert measure_capacity(pair, MIX, seed=1) > 0
    plan = ServingPlan(mix=MIX, sizes=pair.sizes, shares_of_capacity=(0.5,), num_repeats=2)
    runs = measure_arms(pair, plan, 200.0, steps, seed=1)
    assert [run.arm for run in runs] == ["both, chunks of 32", APART]
    for run in runs:
        assert [len(repeat) for repeat in run.repeats] == [7, 7]
        assert all(one.is_whole and len(one.arrivals_ns) == one.request.max_tokens for one in run.heard)
        assert all(one.ttft_ms > 0 and min(one.gaps_ms) >= 0 for one in run.heard)
    first, second = runs[0].repeats
    assert {one.request.prompt for one in first}.isdisjoint(one.request.prompt for one in second)
    columns = steps.columns()
    told = set(zip(columns["arm"], columns["kind"], strict=True))
    assert told == {(run.arm, kind) for run in runs for kind in ("prefill", "decode")} | {
        (APART, "export"),
        (APART, "land"),
    }
    prompts = sum(len(one.request.prompt) for one in first + second)
    for run in runs:
        own = (np.array(columns["arm"]) == run.arm) & (np.array(columns["kind"]) == "prefill")
        assert np.array(columns["tokens"])[own].sum() == prompts
