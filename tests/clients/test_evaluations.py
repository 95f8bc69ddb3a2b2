"""lm-eval's tasks: those that generate, over both of its clients, and those that compare likelihoods, over completions.

Of the first, questions that the embedded model answers, all right. Of the second, every log-likelihood, and so the
score, is the plain forward pass's.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from moonshard.experiments.common.running.server import RunningServer
from moonshard.models.score import Scorer
from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.config.keys import embedded_model_path
from tests.clients.conftest import Installed, Run

TASKS = Path(__file__).parent / "lm_eval"
TASK, CHOICES = "small_talk", "small_choices"
TOLERANCE = 1e-3  # of a continuation's log-likelihood, a sum over its tokens

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("model", "path", "options"),
    [
        ("local-chat-completions", "chat/completions", ""),
        ("local-completions", "completions", f",tokenizer={embedded_model_path()}"),  # as ids, of its own template
    ],
    ids=["chat", "completions"],
)
def test_lm_eval_finds_every_answer_right(
    model: str, path: str, options: str, server: RunningServer, installed: Installed, run: Run, tmp_path: Path
):
    questions = (TASKS / "questions.jsonl").read_text()
    (tmp_path / "questions.jsonl").write_text(questions)  # the task names it as from where it is run
    argv = [
        *(installed("lm-eval") / "lm_eval", "run", "--tasks", TASK, "--include_path", TASKS, "--apply_chat_template"),
        *("--model", model, "--output_path", tmp_path / "out"),
        *("--model_args", f"model={server.model},base_url={server.http}/v1/{path},num_concurrent=2{options}"),
    ]
    run(argv)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(results.read_text())
    assert result["results"][TASK]["exact_match,none"] == 1.0
    assert result["n-samples"][TASK]["effective"] == len(questions.splitlines())


def test_lm_eval_finds_the_likelihoods_of_the_forward_pass(
    server: RunningServer, installed: Installed, run: Run, tmp_path: Path
):
    questions = (TASKS / "choices.jsonl").read_text()
    (tmp_path / "choices.jsonl").write_text(questions)
    options = f"num_concurrent=2,tokenizer={embedded_model_path()}"
    argv = [
        *(installed("lm-eval") / "lm_eval", "run", "--tasks", CHOICES, "--include_path", TASKS, "--log_samples"),
        *("--model", "local-completions", "--batch_size", 4, "--output_path", tmp_path / "out"),  # prompts in a request
        *("--model_args", f"model={server.model},base_url={server.http}/v1/completions,{options}"),
    ]
    run(argv)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    scorer, tokenizer = Scorer(embedded_model_path()), load_tokenizer(embedded_model_path())
    assert tokenizer is not None
    is_right = []
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        expected = [_likelihood(scorer, tokenizer, each) for each in sample["arguments"].values()]
        told = [(float(likelihood), str(is_greedy) == "True") for ((likelihood, is_greedy),) in sample["resps"]]
        assert [likelihood for likelihood, _ in told] == pytest.approx([each[0] for each in expected], abs=TOLERANCE)
        assert [is_greedy for _, is_greedy in told] == [each[1] for each in expected]
        is_right.append(int(np.argmax([each[0] for each in expected])) == sample["doc"]["answer"])
    assert len(is_right) == len(questions.splitlines())
    assert 0 < np.mean(is_right) < 1, "a score that any order of choices has would prove nothing"
    assert json.loads(results.read_text())["results"][CHOICES]["acc,none"] == pytest.approx(np.mean(is_right))


def _likelihood(scorer: Scorer, tokenizer: Tokenizer, argument: Mapping[str, str]) -> tuple[float, bool]:
    """The log-likelihood of a continuation after its context, and whether it is what greedy decoding gives."""
    context, continuation = argument["arg_0"], argument["arg_1"]
    num_before, ids = len(tokenizer.encode(context)), tokenizer.encode(context + continuation)
    rows, follows = scorer.observe(ids).logits[num_before - 1 : -1], np.asarray(ids[num_before:])
    chosen = log_softmax(rows.astype(np.float64), axis=-1)[np.arange(len(follows)), follows]
    return float(chosen.sum()), bool((rows.argmax(axis=-1) == follows).all())
