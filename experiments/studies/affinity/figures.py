"""What the rounds of the arms come to, beside the bars. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from moonshard.experiments.studies.affinity.rounds import ArmName, Round

MAX_POINTS_BELOW_ORACLE = 2.0
MAX_LOAD = 1.2
MIN_TIMES_FASTER = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmFigures:
    """Shares are of prompt tokens over all rounds; the load is that of the worst round."""

    arm: ArmName
    num_turns: int
    prompt_tokens_per_turn: float
    computed_tokens_per_turn: float
    hit_rate: float
    oracle_hit_rate: float
    load_max_over_mean: float  # of tokens computed, by prefill worker
    first_ttft_p50_ms: float  # of first turns
    later_ttft_p50_ms: float
    later_ttft_p90_ms: float
    handoff_gap_p50_ms: float  # of all turns: from the first token to the second, in which the transfer shows

    @property
    def points_below_oracle(self) -> float:
        return 100 * (self.oracle_hit_rate - self.hit_rate)


def figures(arm: ArmName, rounds: Sequence[Round]) -> ArmFigures:
    """The figures of one arm over its rounds; ValueError where there are none."""
    own = [one for one in rounds if one.arm == arm]
    if not own:
        raise ValueError(f"no round of arm {arm}")
    turns = [turn for one in own for turn in one.turns]
    num_prompt = sum(turn.prompt_tokens for turn in turns)
    later = sorted(turn.ttft_ms for turn in turns if turn.index > 0)
    return ArmFigures(
        arm=arm,
        num_turns=len(turns),
        prompt_tokens_per_turn=num_prompt / len(turns),
        computed_tokens_per_turn=(num_prompt - sum(turn.cached_tokens for turn in turns)) / len(turns),
        hit_rate=sum(turn.cached_tokens for turn in turns) / num_prompt,
        oracle_hit_rate=sum(turn.oracle_tokens for turn in turns) / num_prompt,
        load_max_over_mean=max(_max_over_mean(list(one.computed_tokens.values())) for one in own),
        first_ttft_p50_ms=median(turn.ttft_ms for turn in turns if turn.index == 0),
        later_ttft_p50_ms=median(later),
        later_ttft_p90_ms=later[len(later) * 9 // 10],
        handoff_gap_p50_ms=median(turn.handoff_gap_ms for turn in turns if turn.handoff_gap_ms is not None),
    )


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)
