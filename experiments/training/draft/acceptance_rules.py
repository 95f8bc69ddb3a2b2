"""`-m moonshard.experiments.training.draft.acceptance_rules`: how often a first guess would be accepted.

Three rules, all of which keep the target's distribution p; q is the draft's at the same temperature:

- greedy: the draft's likeliest token, accepted if the target draws it, with probability p(argmax q);
- coupled: a draw from q with the noise that the target's draw has, accepted if both fall on one token; Gumbel noise
  makes that sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i)) (arXiv 2408.07978, section 3);
- rejection: a draw from q by itself, accepted with probability min(1, p / q), in all the sum of min(p, q)
  (arXiv 2211.17192, section 2.3). No rule whose guess is drawn from q accepts more.

The places are those of the model's own greedy answers to held-out questions. Only the first guess of a chain counts.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.training.draft.acceptance import LONGEST, Simulation, answered
from moonshard.experiments.training.draft.learn import DRAFT
from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.texts.corpus import POCKET, pocket_text
from moonshard.experiments.training.texts.tools.tasks import MAX_CONTEXT_TOKENS, recall_tasks, talk_tasks, tool_tasks
from moonshard.sharding.arrays import Array, Float

RULES = ("greedy", "coupled", "rejection")
UNSURE = 0.6  # below this probability of its likeliest token a place counts as unsure
LIKELIEST = 64  # tokens of either law that the coupling is summed over; the rest is left out


@functools.partial(jax.jit, static_argnums=2)
def accepted(
    target: Float[Array, "n v"], draft: Float[Array, "n v"], temperature: float
) -> tuple[Float[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """The probability that a guess is accepted, by each rule, of logits over one vocabulary."""
    p, q = jax.nn.softmax(target / temperature), jax.nn.softmax(draft / temperature)
    greedy = jnp.take_along_axis(p, q.argmax(axis=-1)[:, None], axis=-1)[:, 0]
    _, likely = jax.lax.top_k(jnp.minimum(p, q), LIKELIEST)
    at_p, at_q = (jnp.take_along_axis(law, likely, axis=-1)[..., None] for law in (p, q))
    # 1 / sum of max(p_j / p_i, q_j / q_i), where neither divisor may be 0
    shared = at_p * at_q / jnp.maximum(p[:, None] * at_q, q[:, None] * at_p).sum(axis=-1, keepdims=True)
    coupled = jnp.where((at_p > 0) & (at_q > 0), shared, 0).sum(axis=(1, 2))
    return greedy, coupled, jnp.minimum(p, q).sum(axis=-1)


def measured(laws: Sequence[tuple[jax.Array, jax.Array]], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """[3, places]: of each rule at each place of the answers; and at which places the model itself is unsure."""
    found = [np.stack(accepted(target, draft, temperature)) for target, draft in laws]
    sure = [np.asarray(jax.nn.softmax(target).max(axis=-1)) for target, _ in laws]
    return np.concatenate(found, axis=1), np.concatenate(sure) < UNSURE


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moonshard.experiments.training.draft.acceptance_rules", description=__doc__
    )
    parser.add_argument("--draft", type=Path, default=DRAFT, metavar="DIR", help="default: beside the embedded model")
    parser.add_argument("--num", type=int, default=24, help="tasks of each kind; default: %(default)s")
    options = parser.parse_args()
    simulation, model = Simulation(options.draft), GreedyModel(POCKET, "float32", MAX_CONTEXT_TOKENS)
    kinds = {
        "tool calls": [task for task in tool_tasks(0, options.num) if task.rounds],
        "small talk": talk_tasks(0, options.num),
        "recall": recall_tasks(pocket_text(), 0, 512, options.num),
    }
    for name, tasks in kinds.items():
        some = [each for each in answered(tasks, model) if len(each.tokens) <= LONGEST]
        laws = [simulation.first_guesses(each) for each in some]
        for temperature in (0.3, 0.6, 1.0, 1.5):
            shares, is_unsure = measured(laws, temperature)
            for kind, places in (("all", np.ones_like(is_unsure)), ("unsure", is_unsure)):
                means = shares[:, places].mean(axis=1) if places.any() else [float("nan")] * len(RULES)
                told = ", ".join(f"{rule} {share:.3f}" for rule, share in zip(RULES, means, strict=True))
                print(f"{name}, temperature {temperature}: {told}; {places.sum()} places ({kind})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
