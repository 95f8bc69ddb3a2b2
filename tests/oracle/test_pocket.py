"""The embedded model's folder, as it is, in Hugging Face transformers: the same prompts, logits and greedy answers.

"The same" is the rule of `tests.agreement`. Where a router all but ties, either side may take another expert, and all
that follows in this conversation is another computation: it is cut off. How much may be cut has a bound.
"""

import json
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.shape import IM_END
from moonshard.experiments.training.texts.corpus import POCKET, pocket_text
from moonshard.experiments.training.texts.tools.tasks import (
    MAX_CONTEXT_TOKENS,
    Task,
    prompt_tokens,
    recall_tasks,
    tool_tasks,
)
from moonshard.models.score import score
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import LOGIT_TOLERANCE, ROUTER_NEAR_TIE, Reference, assert_drawn_from

ROOT = Path(__file__).parents[2]
ORACLE_PYTHON = ROOT / ".venv-oracle/bin/python"
MAX_CUT_SHARE = 0.25  # of all positions of the conversations
MAX_DIFFERENT_ANSWERS = 1  # of the three, by a near tie of their likeliest tokens
NUM_TOKENS = 32
SEED = 21
MIDDLE = 2  # of a document's five parts
KINDS = ("recall_2048", "tools", "agents")
GREEDY = Sampling(temperature=0.0)

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.xdist_group("oracle"),
    pytest.mark.skipif(not ORACLE_PYTHON.exists(), reason="no .venv-oracle: `make oracle` makes it"),
]


def conversations() -> list[Task]:
    """A document, a conversation with tools that were called before, and an agent's session: one of each of KINDS."""
    recall = [task for task in recall_tasks(pocket_text(), SEED, 2048, 1) if task.depth == MIDDLE]
    called = [task for task in tool_tasks(SEED, 40) if any(message["role"] == "tool" for message in task.messages)]
    return [next(task for task in (*recall, *called) if task.kind == kind) for kind in KINDS]


@cache
def pocket_reference() -> Reference:
    return Reference(POCKET)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    place = tmp_path_factory.mktemp("pocket")
    chats = [{"messages": task.messages, "tools": task.tools} for task in conversations()]
    (place / "chats.json").write_text(json.dumps(chats))
    command = [ORACLE_PYTHON, "-m", "tests.oracle.conversations", POCKET, place / "chats.json", place / "out.npz"]
    made = subprocess.run([*command, str(NUM_TOKENS)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return dict(np.load(place / "out.npz"))


@pytest.mark.parametrize("number", range(len(KINDS)), ids=KINDS)
def test_transformers_renders_a_held_out_conversation_alike(oracle, number):
    task = conversations()[number]
    assert oracle[f"ids{number}"].tolist() == prompt_tokens(pocket_text(), task.messages, task.tools)


def test_transformers_computes_alike_but_after_a_routers_near_tie(oracle):
    nums = {}
    for number, kind in enumerate(KINDS):
        ids = oracle[f"ids{number}"].tolist()
        _, margin = pocket_reference().observe(ids)
        nums[kind] = num_alike(score(POCKET, ids), oracle[f"logits{number}"], margin), len(ids)
    assert sum(alike for alike, _ in nums.values()) >= (1 - MAX_CUT_SHARE) * sum(num for _, num in nums.values()), nums


def num_alike(ours: np.ndarray, theirs: np.ndarray, margin: np.ndarray) -> int:
    """Positions before the first that differs; that one is only allowed at, or after, a near tie of a router.

    Logits are [T, vocab], `margin` is each position's least over the layers [T].
    """
    differs = np.abs(ours - theirs).max(axis=-1) >= LOGIT_TOLERANCE
    if not differs.any():
        return len(differs)
    first = int(differs.argmax())
    least = margin[: first + 1].min()
    assert least < ROUTER_NEAR_TIE, f"the logits at {first} differ, least router margin {least:.1e}"
    return first


def test_transformers_goes_on_greedily_alike_to_the_end_of_the_turn(oracle):
    prompts = [oracle[f"ids{number}"].tolist() for number in range(len(KINDS))]
    answers = GreedyModel(POCKET, "float32", MAX_CONTEXT_TOKENS).generate(prompts, NUM_TOKENS, ())
    num_different = 0
    for number, prompt in enumerate(prompts):
        expected, actual = up_to_end(oracle[f"greedy{number}"].tolist()), up_to_end(list(answers[number]))
        if actual != expected:
            num_different += 1
            for tokens in (expected, actual):
                by_router = assert_drawn_from(pocket_reference(), prompt, tokens, GREEDY)
                assert not by_router, "no excuse here: nearly every long prompt has a router's near tie"
    assert num_different <= MAX_DIFFERENT_ANSWERS


def up_to_end(tokens: list[int]) -> list[int]:
    """The turn with the token that ends it; what comes after that was never learned."""
    return tokens[: tokens.index(IM_END) + 1] if IM_END in tokens else tokens
