"""lm-eval's tasks that generate, over both of its clients: questions that the embedded model answers, all right.

Tasks that compare likelihoods are left out: they ask for the log probabilities of the prompt.
"""

import json
from pathlib import Path

import pytest

from moonshard.experiments.common.running.server import RunningServer
from moonshard.serving.config.keys import embedded_model_path
from tests.clients.conftest import Installed, Run

TASKS = Path(__file__).parent / "lm_eval"
TASK = "small_talk"

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
