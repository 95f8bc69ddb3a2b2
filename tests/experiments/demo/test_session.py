"""The demo over a real gateway, whose worker says what the test scripts: tools run, results go back, all is judged."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from moonshard.experiments.demo.asking import MAX_ROUNDS, Session, count_tokens, parsed
from moonshard.experiments.demo.questions import document_question, weather_questions
from moonshard.experiments.demo.script import Script, ask_over_grpc, ask_over_http
from moonshard.experiments.demo.tables import phase_rows
from moonshard.experiments.demo.toolbox import run_tool
from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.rpc.client import AsyncClient
from moonshard.serving.chat.tool_calls import NAMES
from moonshard.serving.commands.terminal_chat import ServerError
from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, MODEL_NAME, make_config
from tests.serving.gateway.fake_worker import FakeWorker

TOKENIZER = load_tokenizer(FIXTURE)
assert TOKENIZER is not None
END = TOKENIZER.special_tokens["<|im_end|>"]
SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = NAMES.values()
BODY = {"model": MODEL_NAME, "max_tokens": 100}
SCRIPT = Script(document_tokens=600, max_tokens=100, seed=0)


@pytest.fixture
async def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
async def running(worker: FakeWorker) -> AsyncIterator[RunningGateway]:
    async with fake_worker.serving(worker) as port:
        config = make_config(GatewayConfig(port=0, grpc_port=0), FIXTURE, [f"127.0.0.1:{port}"])
        async with asyncio.timeout(60), serving(config) as running:
            await running.gateway.pool.wait_ready()
            yield running


@pytest.fixture
async def http(running: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as client:
        yield client


def say(worker: FakeWorker, *answers: str) -> None:
    """One answer a request, the last one for ever after. The prompt leaves a thought open, which ends at once."""
    assert TOKENIZER is not None
    said = [TOKENIZER.encode("</think>" + answer, allow_special=True) for answer in answers]

    def next_token(_choice: int, _last: int, position: int) -> int:
        tokens = said[min(len(worker.runs), len(said)) - 1]
        place = position - len(worker.runs[-1].prompt_tokens)
        return tokens[place] if place < len(tokens) else END

    worker.script.next_token = next_token


def calling(*cities: str, first: int = 0) -> str:
    calls = (
        f'{CALL_BEGIN}functions.get_weather:{first + index}{ARGUMENTS_BEGIN}{{"city": "{city}"}}{CALL_END}'
        for index, city in enumerate(cities)
    )
    return SECTION_BEGIN + "".join(calls) + SECTION_END


def prompt_text(worker: FakeWorker, index: int = -1) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.decode(list(worker.runs[index].prompt_tokens))


async def test_every_call_of_a_round_is_run_and_its_result_sent_back(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, "Let me look." + calling("Oslo", "Lima"), "Done.")
    shown: list[str] = []
    turn = await Session(http, BODY, shown.append, has_tools=True).ask("?", "tool")
    assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Lima"}),
    ]
    assert turn.answer == "Done."
    results = [run_tool(parsed(call)) for call in turn.calls]
    assert all(result in prompt_text(worker) for result in ["Let me look.", *results])
    assert "".join(shown) == (
        'Let me look.\ncalls get_weather {"city": "Oslo"}\ncalls get_weather {"city": "Lima"}\n'
        f"get_weather returns {results[0]}\nget_weather returns {results[1]}\nDone.\n"
    )


async def test_a_model_that_calls_for_ever_is_stopped(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, calling("Oslo"))
    turn = await Session(http, BODY, lambda _: None, has_tools=True).ask("?", "tool")
    assert len(turn.calls) == len(worker.runs) == MAX_ROUNDS + 1
    assert turn.answer == ""


async def test_an_account_is_of_its_own_request(http: httpx.AsyncClient, worker: FakeWorker):
    say(worker, calling("Oslo"), "Done.")
    turn = await Session(http, BODY, lambda _: None, has_tools=True).ask("?", "tool")
    assert [account.title for account in turn.accounts] == ["tool", "answer"]
    assert [account.num_prompt_tokens for account in turn.accounts] == [len(run.prompt_tokens) for run in worker.runs]
    for account in turn.accounts:
        assert sum(elapsed_ms for _, elapsed_ms in phase_rows(account.timing)) == pytest.approx(account.timing.e2e_ms)


async def test_a_refusal_says_what_the_server_says(http: httpx.AsyncClient):
    with pytest.raises(ServerError, match="max_tokens"):
        await Session(http, BODY | {"max_tokens": 100_000}, lambda _: None, has_tools=False).ask("?", "document")


async def right_answers(http: httpx.AsyncClient) -> list[str]:
    """What a model says that knows everything: to the document, and to call and result of both questions after it."""
    about = await document_question(SCRIPT.seed, SCRIPT.document_tokens, lambda text: count_tokens(http, text))
    cities = [(question, question.calls[0].arguments["city"]) for question in weather_questions(SCRIPT.seed)]
    rounds = [said for index, (q, city) in enumerate(cities) for said in (calling(str(city), first=index), q.answer)]
    return [about.question.answer, *rounds]


async def test_a_model_that_knows_everything_is_right_thrice_and_over_grpc(
    http: httpx.AsyncClient, running: RunningGateway, worker: FakeWorker, capsys: pytest.CaptureFixture[str]
):
    answers = await right_answers(http)
    say(worker, *answers, answers[0])
    about, accounts = await ask_over_http(SCRIPT, http, MODEL_NAME)
    assert capsys.readouterr().out.count("✓ right") == 3
    assert [account.title for account in accounts] == ["document", "tool", "answer", "follow-up", "answer"]
    assert answers[2] in prompt_text(worker)  # the follow-up is asked in the session of the question before it
    assert about.document.text in prompt_text(worker, 0)
    async with AsyncClient(running.grpc) as client:
        await ask_over_grpc(SCRIPT, client, about)
    assert worker.runs[-1].prompt_tokens == worker.runs[0].prompt_tokens
    assert capsys.readouterr().out.endswith(f"{answers[0]}\n✓ right\n")


async def test_a_wrong_answer_is_said_and_ends_nothing(
    http: httpx.AsyncClient, worker: FakeWorker, capsys: pytest.CaptureFixture[str]
):
    answers = await right_answers(http)
    say(worker, answers[0], "I don't know.", *answers[3:])
    _, accounts = await ask_over_http(SCRIPT, http, MODEL_NAME)
    shown = capsys.readouterr().out
    assert (shown.count("✓ right"), shown.count("✗ wrong; right is: calls get_weather")) == (2, 1)
    assert len(accounts) == 4
