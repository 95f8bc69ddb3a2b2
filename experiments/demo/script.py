"""What the demo asks, in its order, and what it prints: questions, answers as they come, and whether they are right."""

import sys
from dataclasses import dataclass

import httpx

from moonshard.experiments.demo.asking import DemoTurn, Session, count_tokens, parsed
from moonshard.experiments.demo.questions import DocumentQuestion, Question, document_question, weather_questions
from moonshard.experiments.demo.tables import Account
from moonshard.experiments.training.texts.conversation import Call
from moonshard.rpc.client import AsyncClient
from moonshard.serving.commands.terminal_chat import user

NUM_SHOWN_LINES = 4  # of the document


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """How long and how much is asked, and which of the possible questions."""

    document_tokens: int
    max_tokens: int
    seed: int


async def ask_over_http(script: Script, http: httpx.AsyncClient, model: str) -> tuple[DocumentQuestion, list[Account]]:
    """Asks the three questions: the first one (to be asked again) and each request's times. ServerError if refused."""
    body = {"model": model, "max_tokens": script.max_tokens, "temperature": 0}
    about = await document_question(script.seed, script.document_tokens, lambda text: count_tokens(http, text))
    heading(f"1. A fact in a document of {about.num_tokens:,} tokens")
    _show_document(about)
    reading = Session(http, body, type_out, has_tools=False)
    turns = [await _turn(reading, about.question, about.prompt, "document")]
    needs_tool, follow_up = weather_questions(script.seed)
    session = Session(http, body, type_out, has_tools=True)
    heading("2. What only a tool knows; it runs here")
    turns.append(await _turn(session, needs_tool, needs_tool.text, "tool"))
    heading("3. The same session goes on")
    turns.append(await _turn(session, follow_up, follow_up.text, "follow-up"))
    return about, [account for turn in turns for account in turn.accounts]


async def ask_over_grpc(script: Script, client: AsyncClient, about: DocumentQuestion) -> Account:
    """Asks the document's question again, over gRPC. RequestError if refused."""
    heading("The document again, over gRPC")
    print(f"> {about.question.text}")
    text = ""
    async with client.stream([user(about.prompt)], max_tokens=script.max_tokens, temperature=0) as stream:
        async for delta in stream:
            type_out(delta.text)
            text += delta.text
    print(f"\n{verdict(about.question, text, [])}")
    usage, timing = stream.summary.usage, stream.summary.timing
    return Account(
        title="gRPC",
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens,
        timing=timing,
    )


def verdict(question: Question, answer: str, calls: list[Call]) -> str:
    """One line. An answer is right if it says what was expected, by the expected calls."""
    if answer.strip() == question.answer and calls == list(question.calls):
        return "✓ right"
    made = "".join(f"calls {call.name} {call.arguments_json()}, then " for call in question.calls)
    return f"✗ wrong; right is: {made}{question.answer}"


async def _turn(session: Session, question: Question, prompt: str, title: str) -> DemoTurn:
    """Asks one question. `prompt` is what is sent: the question, perhaps with a document before it."""
    print(f"> {question.text}")
    turn = await session.ask(prompt, title)
    print(verdict(question, turn.answer, [parsed(call) for call in turn.calls]))
    return turn


def _show_document(about: DocumentQuestion) -> None:
    lines = about.document.lines
    for line in (about.document.title.strip(), *lines[:NUM_SHOWN_LINES]):
        print(f"  {line}")
    print(f"  ... {len(lines)} lines in all; the answer stands in line {about.line}")


def heading(text: str) -> None:
    print(f"\n── {text}")


def type_out(text: str) -> None:
    """Prints text at once, as it arrives."""
    sys.stdout.write(text)
    sys.stdout.flush()
