"""The benchmark's parts with processes of their own: what is computed from their samples, and how it is laid out."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from moonshard.experiments.bench.command import SECTIONS, sections_of
from moonshard.experiments.bench.costs import recording_cost
from moonshard.experiments.bench.costs.recording_cost import (
    OFF,
    RECORDING,
    SPANS,
    RecordedTurn,
    by_start,
    of_turn,
    order_of,
    recording_grid,
)
from moonshard.experiments.bench.costs.row_cost import REQUEST, STEP, measure_rows, row_grid
from moonshard.experiments.bench.report import LAID_OUT
from moonshard.experiments.bench.serving import arrangements, failover, handoff
from moonshard.experiments.bench.serving.arrangements import APART, TOGETHER, OfferedLoad, arrangement_grid, of_load
from moonshard.experiments.bench.serving.failover import WatchedStream, failover_grid, of_kill
from moonshard.experiments.bench.serving.handoff import handoff_grid, of_requests
from moonshard.experiments.bench.serving.streams import Seen
from moonshard.experiments.bench.transfer import transport_rows
from moonshard.experiments.bench.transfer.transport_rows import as_measurements, transport_grid
from moonshard.experiments.bench.transfer.transports import Throughput
from moonshard.experiments.common.grid import Grid, as_markdown, as_table
from moonshard.experiments.common.running.measurement import Measurement, Plan, merge
from moonshard.rpc.types import Timing
from moonshard.serving.config.reading import load_config

MS = 1_000_000  # nanoseconds
TIMING = Timing(
    e2e_ms=60.0,
    ttft_ms=50.0,
    gateway_queue_ms=1.0,
    first_token_ms=48.0,
    decode_ms=10.0,
    finish_ms=1.0,
    worker_queue_ms=0.0,
    worker_prefill_ms=45.0,
    worker_decode_ms=3.0,
    wire_ms=3.0,
    handoff_gap_ms=6.0,
    transfer_ms=30.0,
    exposed_transfer_ms=2.0,
    land_ms=1.5,
    join_ms=0.5,
)


def by_name(measurements) -> dict[str, Measurement]:
    return {one.name: one for one in measurements}


def seen(*arrivals_ms: float, timing: Timing | None = TIMING) -> Seen:
    arrivals_ns = tuple(int(ms * MS) for ms in arrivals_ms)
    return Seen(sent_ns=0, arrivals_ns=arrivals_ns, ended_ns=arrivals_ns[-1], timing=timing)


class TestParts:
    def test_nothing_named_means_everything(self):
        assert sections_of("") == SECTIONS

    def test_named_parts_run_in_the_benchs_own_order(self):
        assert sections_of("failover, transports,steps") == ("steps", "transports", "failover")

    def test_an_unknown_part_is_refused_by_its_name(self):
        with pytest.raises(ValueError, match="no part handof;"):
            sections_of("steps,handof")


class TestGrid:
    def test_both_forms_hold_every_row_and_note(self):
        grid = Grid(title="a title", columns=("what", "ms"), rows=(("x", "1"), ("y", "2")), notes=("a note",))
        assert as_table(grid).row_count == 2
        assert as_table(grid).caption == "a note"
        assert as_markdown(grid).splitlines() == [
            *("### a title", ""),
            *("| what | ms |", "| --- | ---: |", "| x | 1 |", "| y | 2 |"),
            *("", "- a note"),
        ]

    def test_a_part_that_was_not_measured_has_neither_rows_nor_notes(self):
        for lay_out in LAID_OUT:
            grid = lay_out([], Plan())
            assert (grid.rows, grid.notes) == ((), ())


class TestTransports:
    @pytest.mark.parametrize(("ours", "expected"), [(2.42, ("0.81", "held")), (2.38, ("0.79", "missed"))])
    def test_the_bar_is_four_fifths_of_mooncake_used_bare(self, ours: float, expected: tuple[str, str]):
        grid = transport_grid(as_measurements(self.throughputs(ours)), self.plan)
        ((size, copy, *speeds, ratio, verdict),) = grid.rows
        assert (size, copy) == ("1 MiB", "64 KiB")
        assert speeds == ["20.0", "3.00", f"{ours:.2f}", "1.00", ""]  # none was taken in one process
        assert (ratio, verdict) == expected

    def test_a_range_longer_than_the_publish_is_the_publish(self):
        plan = replace(self.plan, copy_bytes=(4 << 20,))
        found = [replace(one, copy_bytes=1 << 20) for one in self.throughputs(3.0)]
        assert [row[:2] for row in transport_grid(as_measurements(found), plan).rows] == [("1 MiB", "1 MiB")]

    plan = Plan(transfer_bytes=(1 << 20,), copy_bytes=(64 << 10,))

    def throughputs(self, ours: float) -> list[Throughput]:
        speeds = {"memcpy": 20.0, transport_rows.BARE: 3.0, transport_rows.OURS: ours, "grpc": 1.0}
        return [
            Throughput(way=way, size_bytes=1 << 20, copy_bytes=64 << 10, samples_gb_per_s=(speed, speed, 9 * speed))
            for way, speed in speeds.items()
        ]


class TestHandoffs:
    def test_the_exposed_part_is_all_that_comes_after_the_first_token_but_decoding(self):
        found = by_name(of_requests(512, [TIMING]))
        assert found["exposed part, 512 prompt tokens"].samples == (4.0,)
        assert found[f"{handoff.SHARE}, 512 prompt tokens"].samples == (pytest.approx(0.08),)

    @pytest.mark.parametrize(("land_ms", "verdict"), [(2.5, "held"), (2.6, "missed")])
    def test_the_bar_is_a_tenth_of_ttft(self, land_ms: float, verdict: str):
        found = of_requests(512, [replace(TIMING, land_ms=land_ms)] * 3)
        ((length, *_, num, said),) = handoff_grid(found, Plan()).rows
        assert (length, num, said) == ("512", "3", verdict)

    def test_enough_requests_of_every_length(self):
        assert Plan().handoff_repeats >= 20


class TestRecording:
    def rounds(self, *elapsed_s: tuple[float, float, float]) -> list[Measurement]:
        turns = [
            one
            for seconds in elapsed_s
            for way, each_s in zip((OFF, RECORDING, SPANS), seconds, strict=True)
            for one in of_turn(way, RecordedTurn(num_tokens=1000, elapsed_s=each_s, cpu_s=each_s / 2))
        ]
        return merge(turns)

    def test_a_ratio_is_of_the_two_turns_of_one_round(self):
        """A machine that is ten times slower in one round says nothing of recording."""
        found = self.rounds((1.0, 1.25, 1.0), (10.0, 12.5, 10.0), (2.0, 2.5, 2.0), (1.0, 1.25, 1.0))
        grid = recording_grid(found, Plan(recording_rounds=2))
        rows = {row[0]: dict(zip(recording_cost.COLUMNS, row, strict=True)) for row in grid.rows}
        tokens = rows[f"output tokens, {RECORDING}"]
        assert (tokens["off, p50"], tokens["on, p50"]) == ("750", "600")
        assert (tokens["on / off"], tokens["95% interval"], tokens["starts"]) == ("0.800", "0.800 to 0.800", "2")
        assert tokens[recording_cost.COLUMNS[-1]] == "missed"
        assert rows[f"output tokens, {SPANS}"][recording_cost.COLUMNS[-1]] == "held"
        processor = rows[f"processor time per token, {RECORDING}"]
        assert (processor["on / off"], processor[recording_cost.COLUMNS[-1]]) == ("1.250", "")

    def test_deployments_that_differ_from_start_to_start_tell_neither(self):
        """However alike the rounds of one start are."""
        fast, slow = (1.0, 0.9, 1.0), (1.0, 1.1, 1.0)
        found = self.rounds(fast, fast, fast, slow, slow, slow)
        (row, *_) = recording_grid(found, Plan(recording_rounds=3)).rows
        assert row[-1] == "open"
        (row, *_) = recording_grid(found, Plan(recording_rounds=6)).rows  # a single start
        assert row[-3:] == ("", "1", "open")

    def test_a_start_has_the_geometric_mean_of_its_rounds(self):
        assert by_start([1.0, 1.0, 2.0, 2.0], [2.0, 8.0, 2.0, 2.0], 2) == pytest.approx([4.0, 1.0])

    def test_a_row_costs_processor_time_and_a_token_has_few_of_them(self):
        plan = Plan(row_repeats=1)
        found = measure_rows(plan)
        assert {one.name: len(one.samples) for one in found} == {STEP: 1, REQUEST: 1}
        assert found[0].median > 0  # the other is a difference: what else this process does may outweigh it
        off = Measurement(level="recording", name="off", unit="us", samples=(2000.0,))
        by_token = [replace(off, name=f"{one.name}, rows a token", unit="ratio", samples=(0.5,)) for one in found]
        *_, both = row_grid([*found, *by_token, off], "off").rows
        us = sum(one.median for one in found) / 2
        assert float(both[-2].rstrip("%")) / 100 == pytest.approx(us / 2000, abs=1e-5)
        assert both[-1] == ("held" if us < 20 else "missed")
        dear = [replace(one, samples=(5000.0,)) for one in found]
        assert row_grid([*dear, *by_token, off], "off").rows[-1][-1] == "missed"
        assert row_grid(found, "off").rows == ()

    def test_each_begins_as_often_as_any_other_and_follows_each_as_often(self):
        orders = [order_of("abc", index) for index in range(12)]
        assert [order[0] for order in orders] == list("abcabcabcabc")
        pairs = Counter(pair for order in orders for pair in pairwise(order))
        assert set(pairs) == set(permutations("abc", 2))
        assert set(pairs.values()) == {4}


class TestArrangements:
    def load(self, scale: float, timing: Timing) -> OfferedLoad:
        streams = [seen(10 * scale, 12 * scale, 16 * scale, timing=timing)] * 2
        cpu_s = {"gateway": 0.5, "prefill 0": 1.0, "decode 0": 0.75, "client": 0.25}
        return OfferedLoad(streams=streams, long=[seen(100 * scale)], prompt_tokens=93, elapsed_s=2.0, cpu_s=cpu_s)

    def test_a_ratio_is_disaggregated_over_aggregated(self):
        found = [*of_load(APART, self.load(1, TIMING)), *of_load(TOGETHER, self.load(4, TIMING))]
        columns = arrangements.COLUMNS
        rows = {row[0]: dict(zip(columns, row, strict=True)) for row in arrangement_grid(found, Plan()).rows}
        assert rows["TTFT, long prompts"]["PD p50"] == "100"
        assert rows["TTFT, long prompts"]["agg. p50"] == "400"
        assert rows["ITL, streams"]["ratio p99"] == "0.25"
        assert rows["output tokens, streams"]["ratio p50"] == "1.00"

    def test_throughput_is_of_all_tokens_that_were_read_or_written(self):
        found = by_name(of_load(APART, self.load(1, TIMING)))
        assert found[f"output tokens, streams, {APART}"].samples == (3.0,)  # two streams of three, in two seconds
        assert found[f"prompt and output tokens, all requests, {APART}"].samples == (50.0,)

    def test_long_prompts_take_half_of_a_devices_time_at_most(self):
        plan = Plan(long_prompt_every_s=1.0, arrangement_s=12.0)
        assert arrangements.paced(plan, 0.1) == plan
        slow = arrangements.paced(plan, 2.0)
        assert (slow.long_prompt_every_s, slow.arrangement_s) == (4.0, 24.0)
        assert (
            "every 4 s"
            in arrangement_grid(
                [
                    *of_load(APART, self.load(1, TIMING)),
                    Measurement(level="arrangements", name=arrangements.EVERY, unit="s", samples=(4.0,)),
                ],
                plan,
            ).notes[0]
        )

    def test_a_handoff_is_among_all_gaps_and_not_among_the_later_ones(self):
        found = by_name(of_load(APART, self.load(1, TIMING)))
        assert found[f"ITL, streams, {APART}"].samples == (2.0, 4.0) * 2
        assert found[f"ITL from the second token on, streams, {APART}"].samples == (4.0,) * 2

    def test_what_did_not_move_has_no_handoff_gap(self):
        found = by_name(of_load(TOGETHER, self.load(1, replace(TIMING, handoff_gap_ms=0.0))))
        assert f"handoff gap, streams, {TOGETHER}" not in found
        assert by_name(of_load(APART, self.load(1, TIMING)))[f"handoff gap, streams, {APART}"].samples == (6.0, 6.0)

    def test_processor_time_is_a_share_of_one_core_with_all_workers_together(self):
        found = by_name(of_load(APART, self.load(1, TIMING)))
        shares = [found[f"a core's share, {who}, {APART}"].median for who in ("gateway", "load generator", "workers")]
        assert shares == [0.25, 0.125, 0.875]

    def test_both_arrangements_have_as_many_workers(self):
        config = load_config(None, ["prefill.replicas=3", "decode.replicas=4"])
        apart, together = arrangements.apart(config), arrangements.together(config)
        assert (apart.mode, apart.prefill.replicas + apart.decode.replicas) == ("disaggregated", 2)
        assert (together.mode, together.decode.replicas) == ("aggregated", 2)


class TestFailover:
    def stream(self, *arrivals_ms: float, num_retries: int = 0, is_failed: bool = False) -> WatchedStream:
        arrivals_ns = [int(ms * MS) for ms in arrivals_ms]
        return WatchedStream(num_prompt=100, arrivals_ns=arrivals_ns, num_retries=num_retries, is_failed=is_failed)

    def test_a_stall_is_the_longest_gap_that_ends_after_the_kill(self):
        stream = self.stream(0, 500, 501, 580, 581)
        assert stream.stall_ms(510 * MS) == 79
        assert stream.stall_ms(100 * MS) == 500
        assert stream.stall_ms(581 * MS) is None

    def test_what_was_lost_is_the_prompt_and_the_tokens_until_the_kill(self):
        assert self.stream(0, 10, 20, 90).num_lost(20 * MS) == 103

    def test_streams_that_lost_their_worker_are_told_from_those_that_kept_it_and_those_that_failed(self):
        streams = [self.stream(0, 50, num_retries=1), self.stream(0, 12), self.stream(0, 90, is_failed=True)]
        found = by_name(of_kill(streams, 10 * MS))
        assert found[failover.STALL].samples == (50.0,)
        assert found[failover.KEPT].samples == (12.0,)
        assert found[failover.LOST_TOKENS].samples == (101.0,)
        assert found[failover.LOST_STREAMS].samples == (1.0,)
        assert found[failover.FAILED].samples == (1.0,)

    def test_the_table_begins_with_the_stall(self):
        grid = failover_grid(of_kill([self.stream(0, 50, 51, num_retries=1)], 10 * MS), Plan())
        assert [row[0] for row in grid.rows] == [
            failover.STALL,
            failover.LOST_TOKENS,
            failover.LOST_STREAMS,
            failover.FAILED,
        ]
