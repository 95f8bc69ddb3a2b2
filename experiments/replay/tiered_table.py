"""What replays with tiers found, as a table: a row for each policy, of the means over its runs."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from moonshard.experiments.replay.tiered import TieredReplayed, Ttft


def tiered_table(runs: Mapping[str, Sequence[TieredReplayed]]) -> str:
    """`runs` by policy. All have the same tiers."""
    names = [tier.name for tier in next(iter(runs.values()))[0].tiers]
    header = [
        *("retention", "found again", "device", *names, "one unbounded cache", "up, TB", "down, TB"),
        *("TTFT p50, p95, p99, s", "of later turns", "load, max / mean", "decisions/s"),
    ]
    rows = [[policy, *_cells(found)] for policy, found in runs.items()]
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(runs: Sequence[TieredReplayed]) -> list[str]:
    def mean(figure: Callable[[TieredReplayed], float]) -> float:
        return fmean(map(figure, runs))

    def seconds(which: Callable[[TieredReplayed], Ttft]) -> str:
        found = [which(run) for run in runs]
        means = (fmean(each) for each in zip(*((one.p50_s, one.p95_s, one.p99_s) for one in found), strict=True))
        return ", ".join(f"{each:.2f}" for each in means)

    by_tier = zip(*(run.tiers for run in runs), strict=True)
    return [
        f"{mean(lambda run: run.hit_rate):.2%}",
        f"{mean(lambda run: run.device_hit_rate):.2%}",
        *(f"{fmean(tier.hit_rate for tier in each):.2%}" for each in by_tier),
        f"{mean(lambda run: run.oracle_hit_rate):.2%}",
        f"{mean(lambda run: sum(tier.bytes_up for tier in run.tiers)) / 1e12:.2f}",
        f"{mean(lambda run: sum(tier.bytes_down for tier in run.tiers)) / 1e12:.2f}",
        seconds(lambda run: run.ttft),
        seconds(lambda run: run.later_ttft),
        f"{mean(lambda run: run.load_max_over_mean):.3f}",
        f"{mean(lambda run: run.decisions_per_s):,.0f}",
    ]
