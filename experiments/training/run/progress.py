"""One line of progress from the steps since the last one, for people and for the curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moonshard.experiments.training.measure import Accuracy
from moonshard.experiments.training.run.recipe import Recipe
from moonshard.experiments.training.run.step import StepSums


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A step that was run: what it reported, how long it took, and how long it waited for rows."""

    report: StepSums  # on the host
    seconds: float
    waited_s: float


def summarise(recipe: Recipe, step: int, taken: Sequence[Taken]) -> dict[str, float | int | str]:
    """The record after `step` steps, from the last few of them."""
    sums = [each.report.sums for each in taken]
    stage = recipe.stage_of(step - 1)
    num_tokens = recipe.tokens_until(step) - recipe.tokens_until(step - len(taken))
    seconds = sum(each.seconds for each in taken)
    return {
        "step": step,
        "stage": stage.name,
        "tokens": recipe.tokens_until(step),
        "loss": _share(sum(float(s.answer_loss) for s in sums), sum(float(s.num_answer_tokens) for s in sums)),
        "weighted_loss": _share(sum(float(s.loss) for s in sums), sum(float(s.weight) for s in sums)),
        "tokens_per_s": num_tokens / seconds,
        "seconds": seconds,
        "waited_s": sum(each.waited_s for each in taken),
        "learning_rate": float(taken[-1].report.learning_rate),
        "gradient_norm": float(np.mean([each.report.gradient_norm for each in taken])),
        "load": worst_load(np.sum([s.loads for s in sums], axis=0)),
    }


def worst_load(loads: np.ndarray) -> float:
    """In the least even layer, the busiest expert's load over the mean; 0 without experts or tokens."""
    means = loads.mean(axis=1)
    return float((loads.max(axis=1) / np.maximum(means, 1.0)).max()) if len(means) else 0.0


def line(record: Mapping[str, float | int | str]) -> str:
    return (
        "step {step:6d}  {stage:8s} {tokens:11,d} tokens  loss {loss:.4f} ({weighted_loss:.4f})  "
        "{tokens_per_s:8,.0f} tokens/s  rate {learning_rate:.2e}  load {load:.2f}  waited {waited_s:.1f} s"
    ).format(**record)


def accuracy_records(step: int, found: Mapping[str, Accuracy]) -> list[dict[str, float | int | str]]:
    return [
        {
            "step": step,
            "skill": skill,
            "answers_right": each.answers,
            "tokens_right": each.tokens,
            "num_answers": each.num_answers,
        }
        for skill, each in found.items()
    ]


def accuracy_line(step: int, found: Mapping[str, Accuracy]) -> str:
    """Shares of answers that are wholly right, and of tokens."""
    return f"step {step:6d}  held out: " + ", ".join(
        f"{skill} {each.answers:.3f} ({each.tokens:.3f})" for skill, each in found.items()
    )


def _share(total: float, count: float) -> float:
    return total / count if count else 0.0
