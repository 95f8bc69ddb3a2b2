"""`moonshard eval`: held-out questions, asked of the model in this process or of a running server, and the table."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from moonshard.experiments.common.json_file import check_writable, write_json
from moonshard.experiments.evaluation.figures import CLIENT_ROWS, RECALL_TOKENS, ROWS, TOOL_ROWS
from moonshard.experiments.evaluation.interview import InterviewOutcome, interview
from moonshard.experiments.evaluation.replies import Answerer
from moonshard.experiments.evaluation.report import Evaluation, footnotes, table, to_json
from moonshard.experiments.evaluation.served import ServedAnswers
from moonshard.experiments.training.texts.corpus import POCKET, Text
from moonshard.experiments.training.texts.tools.tasks import (
    Task,
    client_tasks,
    prompt_tokens,
    recall_tasks,
    talk_tasks,
    tool_tasks,
)
from moonshard.models.tokenizers.tokenizer import TextError, load_tokenizer
from moonshard.serving.chat.template import TemplateError, load_chat_template
from moonshard.serving.commands.options import ApiKey, api_key_of
from moonshard.serving.config.keys import ConfigError
from moonshard.serving.deploy.startup import prepare_jax
from moonshard.sharding.shape import MeshShape

UNWRITTEN, INTERRUPTED = 1, 130  # exit codes
Dtype = Literal["float32", "bfloat16"]


def evaluate(
    model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None,
    url: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None,
    api_key: ApiKey = None,
    seed: int = 0,
    num: int = 200,
    rows: Annotated[str, tyro.conf.arg(metavar="A,B")] = "",
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    dtype: Dtype = "float32",
) -> int:
    """Ask held-out questions with known answers and print the shares that were right.

    Args:
        model: the checkpoint's folder; by default the embedded model. With --url only its tokenizer and template count.
        url: a running server's HTTP API, to be asked instead of the model in this process.
        seed: another one asks other questions.
        num: questions of each row, at least 1; recall rounds up to a multiple of 5, tools add a quarter without a call.
        rows: some of recall_512, recall_2048, recall_4000, tool_json, tool_call, tool_answer, client_call and
            client_answer; by default all.
        json_file: where to write shares and details.
        dtype: what to compute in, without --url.
    """
    if num < 1:
        raise ConfigError([f"--num {num}: at least 1"])
    wanted = read_rows(rows)
    if json_file is not None:
        check_writable(json_file)
    folder = POCKET if model is None else model
    text = text_of(folder)
    with answering(folder, url, api_key_of(api_key), text, dtype) as answerer, naming(folder):
        evaluation = run(answerer, question_sets(text, seed, num, wanted), seed, num)
    show(evaluation)
    if json_file is not None and not write_json(json_file, to_json(evaluation)):
        return UNWRITTEN
    return INTERRUPTED if evaluation.is_interrupted else 0


def read_rows(text: str) -> tuple[str, ...]:
    """The named rows, in the table's order. ConfigError for an unknown name."""
    named = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [name for name in named if name not in ROWS]:
        raise ConfigError([f"--rows: there is no row {unknown[0]!r}; there are {', '.join(ROWS)}"])
    return tuple(row for row in ROWS if row in named) or ROWS


def text_of(folder: Path) -> Text:
    """What renders and counts the prompts, tried on one. ConfigError where the folder has none or it fails.

    Raises TokenizerError and TemplateFileError too.
    """
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    if tokenizer is None or template is None:
        raise ConfigError([f"--model {folder}: no {'tokenizer' if tokenizer is None else 'chat template'} there"])
    text = Text(tokenizer=tokenizer, template=template)
    with naming(folder):
        prompt_tokens(text, [{"role": "user", "content": "Hello."}])
    return text


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turns the failure of a template that parses but cannot render into a ConfigError that names the folder."""
    try:
        yield
    except (TemplateError, TextError) as error:
        raise ConfigError([f"--model {folder}: {error}"]) from error


def question_sets(text: Text, seed: int, num: int, rows: tuple[str, ...]) -> Mapping[str, Callable[[], list[Task]]]:
    """What is asked for these rows, in order. The tool rows share their questions, and so do the client rows.

    They are made when they are due. Small talk is no row: it is asked along with all of them.
    """
    found: dict[str, Callable[[], list[Task]]] = {}
    for row, num_tokens in RECALL_TOKENS.items():
        if row in rows:
            found[row] = lambda num_tokens=num_tokens: recall_tasks(text, seed, num_tokens, num)
    if any(row in rows for row in TOOL_ROWS):
        found["tools"] = lambda: tool_tasks(seed, num)
    if any(row in rows for row in CLIENT_ROWS):
        found["clients"] = lambda: client_tasks(seed, num)
    if rows == ROWS:
        found["talk"] = lambda: talk_tasks(seed, -(-num // 4))
    return found


@contextmanager
def answering(model: Path, url: str | None, api_key: str | None, text: Text, dtype: Dtype) -> Iterator[Answerer]:
    """The model in this process, or the server at `url`. Raises what a bad folder or a missing server raises."""
    if url is not None:
        with ServedAnswers(url, api_key) as server:
            yield server
        return
    prepare_jax(MeshShape())
    from moonshard.experiments.evaluation.in_process import InProcess

    yield InProcess(model, text, dtype)


def run(answerer: Answerer, sets: Mapping[str, Callable[[], list[Task]]], seed: int, num: int) -> Evaluation:
    """Asks everything. After Ctrl-C it returns the outcomes so far."""
    outcomes: list[InterviewOutcome] = []
    seconds: dict[str, float] = {}
    is_interrupted = False
    console = Console(stderr=True, highlight=False)
    try:
        for name, make in sets.items():
            begun_s = time.perf_counter()
            with console.status(f"{name}: making the questions") as status:
                tasks = make()
                for done, outcome in enumerate(interview(answerer, tasks)):
                    outcomes.append(outcome)
                    status.update(f"{name}: {done + 1} of {len(tasks)}")
            seconds[name] = time.perf_counter() - begun_s
            console.print(f"{name}: {len(tasks)} questions in {seconds[name]:.0f} s")
    except KeyboardInterrupt:
        is_interrupted = True
    return Evaluation(
        identity=answerer.identity,
        seed=seed,
        num=num,
        outcomes=outcomes,
        seconds=seconds,
        router_load=answerer.router_load(),
        is_interrupted=is_interrupted,
    )


def show(evaluation: Evaluation) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(evaluation))
    for note in footnotes(evaluation):
        console.print(note, markup=False)
