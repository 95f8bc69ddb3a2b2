"""What the rounds of the arms come to, beside the bars. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from moonshard.experiments.studies.affinity.rounds import ArmName, Round
from moonshard.experiments.studies.sessions import TurnFigures, turn_figures

MAX_POINTS_BELOW_ORACLE = 2.0
MAX_LOAD = 1.2
MIN_TIMES_FASTER = 3.0


@dataclass(frozen=True, kw_only=True)
class ArmFigures(TurnFigures):
    """Over all rounds; the load is that of the worst round."""

    arm: ArmName
    prompt_tokens_per_turn: float
    computed_tokens_per_turn: float
    load_max_over_mean: float  # of tokens computed, by prefill worker
    handoff_gap_p50_ms: float  # of all turns: from the first token to the second, in which the transfer shows


def figures(arm: ArmName, rounds: Sequence[Round]) -> ArmFigures:
    """The figures of one arm over its rounds; ValueError where there are none."""
    own = [one for one in rounds if one.arm == arm]
    if not own:
        raise ValueError(f"no round of arm {arm}")
    turns = [turn for one in own for turn in one.turns]
    num_prompt = sum(turn.prompt_tokens for turn in turns)
    return ArmFigures(
        arm=arm,
        prompt_tokens_per_turn=num_prompt / len(turns),
        computed_tokens_per_turn=(num_prompt - sum(turn.cached_tokens for turn in turns)) / len(turns),
        load_max_over_mean=max(_max_over_mean(list(one.computed_tokens.values())) for one in own),
        handoff_gap_p50_ms=median(turn.handoff_gap_ms for turn in turns if turn.handoff_gap_ms is not None),
        **asdict(turn_figures(turns)),
    )


def _max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)
