"""What users of a client library do first: a chat, a stream, a tool, and a prompt that is too long.

Each library has a small program under `python/` or `node/`, written as its users write it. It gets what to ask as JSON,
and prints what came of it.
"""

import json
from pathlib import Path

import httpx
import pytest

from moonshard.experiments.common.running.server import RunningServer
from tests.clients.conftest import MAX_CONTEXT_TOKENS, Installed, Run
from tests.clients.environments import node, node_environment

QUESTION, ANSWER = "What is moonshard?", "moonshard is a serving stack for Kimi-style models."
TOOL_QUESTION, TOOL_ANSWER = "What is the weather in Lima?", "It is 13 degrees and rainy in Lima."
WEATHER = json.dumps({"degrees": 13, "sky": "rainy"})
PYTHON_CLIENTS = ("openai", "anthropic", "langchain", "litellm", "pydantic-ai", "openai-agents", "inspect-ai")
OVER_RESPONSES = ("openai", "openai-agents")  # which speak another API as well
NODE_CLIENTS = ("openai", "ai-sdk")
CALLED_OVERFLOW = {"litellm": "ContextWindowExceededError", "inspect-ai": "model_length"}
SHOW_NO_PIECES = {"inspect-ai"}  # their streams are seen whole

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_a_python_client_works_unchanged(name: str, server: RunningServer, installed: Installed, run: Run):
    script = Path(__file__).parent / "python" / f"run_{name.replace('-', '_')}.py"
    said = run([installed(name) / "python", script, asked(server)])
    check(name, json.loads(said.splitlines()[-1]), counted(server))


@pytest.mark.parametrize("name", OVER_RESPONSES)
def test_a_python_client_works_unchanged_over_responses(
    name: str, server: RunningServer, installed: Installed, run: Run
):
    script = Path(__file__).parent / "python" / f"run_{name.replace('-', '_')}_responses.py"
    said = run([installed(name) / "python", script, asked(server)])
    check(name, json.loads(said.splitlines()[-1]), counted(server))


@pytest.mark.parametrize("name", NODE_CLIENTS)
def test_a_node_client_works_unchanged(name: str, server: RunningServer, run: Run):
    script = node_environment() / f"run_{name.replace('-', '_')}.mjs"
    check(name, json.loads(run([node(), script, asked(server)])), counted(server))


def test_openais_package_has_its_files_and_batches(server: RunningServer, installed: Installed, run: Run):
    script = Path(__file__).parent / "python" / "run_openai_batches.py"
    assert json.loads(run([installed("openai") / "python", script, asked(server)])) == {
        "status": "completed",
        "metadata": {"of": "a test"},
        "counts": {"total": 3, "completed": 1, "failed": 2},
        "answers": [["good", ANSWER]],
        "errors": [[None, None], ["bad", 400]],
        "listed": True,
        "files": ["batch", "batch_output", "batch_output"],
        "cancelled": "completed",
        "deleted": True,
    }


def asked(server: RunningServer) -> str:
    return json.dumps(
        {
            "base_url": f"{server.http}/v1",
            "model": server.model,
            "question": QUESTION,
            "answer": ANSWER,
            "tool_question": TOOL_QUESTION,
            "tool_answer": TOOL_ANSWER,
            "weather": WEATHER,
            "too_long": "word " * MAX_CONTEXT_TOKENS,
        }
    )


def counted(server: RunningServer) -> list[int]:
    """Tokens of the question and of its answer, as the server says itself."""
    body = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}]}
    usage = httpx.post(f"{server.http}/v1/chat/completions", json=body, trust_env=False).json()["usage"]
    return [usage["prompt_tokens"], usage["completion_tokens"]]


def check(name: str, said: dict, usage: list[int]) -> None:
    assert (said["chat"], "".join(said["pieces"])) == (ANSWER, ANSWER)
    assert len(said["pieces"]) > 1 or name in SHOW_NO_PIECES
    assert said["usage"] == said["stream_usage"] == usage
    assert (said["calls"], said["answer"]) == ([{"city": "Lima"}], TOOL_ANSWER)
    assert said["overflow"] == CALLED_OVERFLOW.get(name, "context_length_exceeded")
