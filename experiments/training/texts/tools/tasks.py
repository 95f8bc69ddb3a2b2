"""Questions with known answers: held-out ones for an evaluation, in one process or of a server, others for training.

The same seed gives the same tasks, whoever answers them. Recall documents are filled, by the tokenizer's own count, up
to the length that a row names. Conversations with tools are cut before one of the assistant's turns, so that all turns
before it are the true ones. Asking and grading are done in `experiments.evaluation`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from moonshard.experiments.training.texts.conversation import (
    HELD_OUT,
    CallRound,
    Conversation,
    Message,
    Tool,
    random_of,
)
from moonshard.experiments.training.texts.corpus import Generator, Text
from moonshard.experiments.training.texts.recall import DOMAINS, UNKNOWN, Document, ask, document, unknown_fact
from moonshard.experiments.training.texts.talk import talk_conversation
from moonshard.experiments.training.texts.tools.agents import agent_conversation
from moonshard.experiments.training.texts.tools.tools import client_conversation, tool_conversation

MAX_CONTEXT_TOKENS = 4096  # of a prompt and its answer
MAX_ANSWER_TOKENS = 96  # of one turn; the longest true ones have some 60
NUM_DEPTHS = 5  # parts of a document; each gets one question
SYSTEM_EVERY = 3  # one document in so many is the system message; the others stand before the question
AGENTS_EVERY = 4  # one conversation with tools in so many is an agent's
TOOL_TOKENS, AGENT_TOKENS, TALK_TOKENS = (256, 1024), (512, 1536), (32, 320)  # shortest and longest conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A question after what was said before, the calls that it takes, and the answer.

    `messages` end with the question. Neighbours with the same document follow each other.
    """

    kind: str
    messages: tuple[Message, ...]
    answer: str
    tools: tuple[Tool, ...] = ()
    rounds: tuple[CallRound, ...] = ()
    depth: int | None = None  # of the fact in its document, in fifths: 0 to 4


@dataclass(frozen=True, slots=True)
class Source:
    """What tasks are made from: the same source gives the same tasks."""

    seed: int
    split: str = HELD_OUT

    def random(self, *place: object) -> Random:
        return random_of(self.split, self.seed, *place)


def recall_tasks(text: Text, seed: int, num_tokens: int, num: int, split: str = HELD_OUT) -> list[Task]:
    """Single questions about documents, each prompt as near below `num_tokens` as whole lines allow.

    Of each document one question per fifth of its length, and one about a fact that is not there (kind "unknown").
    `num` is the number of the former, rounded up to whole documents.
    """
    found: list[Task] = []
    for number in range(-(-num // NUM_DEPTHS)):
        found += _document_tasks(text, Source(seed, split), num_tokens, number)
    return found


def tool_tasks(seed: int, num: int, split: str = HELD_OUT) -> list[Task]:
    """`num` questions that take calls, and a quarter as many that take none; of both, some in agent sessions."""
    source = Source(seed, split)
    calling = [_tool_task(source, number, takes_calls=True) for number in range(num)]
    return calling + [_tool_task(source, number, takes_calls=False) for number in range(-(-num // 4))]


def client_tasks(seed: int, num: int, split: str = HELD_OUT) -> list[Task]:
    """`num` questions that take calls, each in another client's manner."""
    source = Source(seed, split)
    return [_task_of("clients", source, number, takes_calls=True) for number in range(num)]


def talk_tasks(seed: int, num: int) -> list[Task]:
    """Questions of small talk, each the last of a conversation."""
    found: list[Task] = []
    for number in range(num):
        random = random_of(HELD_OUT, seed, "talk", number)
        conversation = talk_conversation(random, HELD_OUT, random.randint(*TALK_TOKENS))
        found.append(cut("talk", conversation, len(conversation.exchanges) - 1))
    return found


def cut(kind: str, conversation: Conversation, index: int) -> Task:
    """The conversation up to the question of one exchange."""
    exchange = conversation.exchanges[index]
    before = replace(conversation, exchanges=conversation.exchanges[:index])
    return Task(
        kind=kind,
        messages=(*before.messages(), {"role": "user", "content": exchange.question}),
        tools=conversation.tools,
        rounds=exchange.rounds,
        answer=exchange.answer,
    )


def num_prompt_tokens(text: Text, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    return len(prompt_tokens(text, messages, tools))


def prompt_tokens(text: Text, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
    """The prompt's tokens as a server renders them, up to where the assistant begins."""
    return text.template.encode_chat(text.tokenizer, messages, template_kwargs={"tools": list(tools) or None})


def _tool_task(source: Source, number: int, *, takes_calls: bool) -> Task:
    is_agent = number % AGENTS_EVERY == AGENTS_EVERY - 1
    return _task_of("agents" if is_agent else "tools", source, number, takes_calls=takes_calls)


def _task_of(kind: str, source: Source, number: int, *, takes_calls: bool) -> Task:
    """An exchange of a conversation; one that has none of the wanted sort is drawn again."""
    generator, bounds = _TOOL_KINDS[kind]
    for attempt in range(1000):
        random = source.random(kind, takes_calls, number, attempt)
        conversation = generator(random, source.split, random.randint(*bounds))
        wanted = [
            index for index, exchange in enumerate(conversation.exchanges) if bool(exchange.rounds) == takes_calls
        ]
        if wanted:
            return cut(kind, conversation, random.choice(wanted))
    raise RuntimeError(f"no {kind} conversation has an exchange with takes_calls={takes_calls}")


_TOOL_KINDS: dict[str, tuple[Generator, tuple[int, int]]] = {
    "tools": (tool_conversation, TOOL_TOKENS),
    "agents": (agent_conversation, AGENT_TOKENS),
    "clients": (client_conversation, TOOL_TOKENS),
}


def _document_tasks(text: Text, source: Source, num_tokens: int, number: int) -> list[Task]:
    in_system = number % SYSTEM_EVERY == SYSTEM_EVERY - 1
    whole = _document(text, source, num_tokens, number)

    def longest(num_lines: int) -> int:
        """Tokens of the longest prompt about that many lines."""
        messages = [task.messages for task in _questions(whole, source, num_tokens, number, num_lines, in_system)]
        return num_prompt_tokens(text, max(messages, key=lambda each: len(each[-1]["content"])))

    sizes = range(NUM_DEPTHS, len(whole.lines) + 1)
    num_lines = sizes[bisect_right(sizes, num_tokens, key=longest) - 1]
    while True:  # the longest in characters need not be the longest in tokens
        tasks = _questions(whole, source, num_tokens, number, num_lines, in_system)
        if all(num_prompt_tokens(text, task.messages) <= num_tokens for task in tasks):
            return tasks
        num_lines -= 1


def _document(text: Text, source: Source, num_tokens: int, number: int) -> Document:
    """A document of the kind whose turn it is, longer than `num_tokens`."""
    for attempt in range(1000):
        place = ("recall", num_tokens, number, attempt)
        domain = DOMAINS[number % len(DOMAINS)]
        if document(source.random(*place), source.split, 1).domain is not domain:
            continue
        if (found := _longer_than(num_tokens, text, source, place)) is not None:
            return found
    raise RuntimeError(f"no document of kind {DOMAINS[number % len(DOMAINS)].title!r} was drawn")


def _longer_than(num_tokens: int, text: Text, source: Source, place: tuple[object, ...]) -> Document | None:
    """A document longer than `num_tokens`; None where the kind has too few keys for that."""
    size, num_lines = num_tokens, 0
    while True:
        found = document(source.random(*place), source.split, size)
        if len(text.tokenizer.encode(found.text)) > num_tokens:
            return found
        if len(found.lines) == num_lines:
            return None
        size, num_lines = size + size // 4, len(found.lines)


def _questions(
    whole: Document, source: Source, num_tokens: int, number: int, num_lines: int, in_system: bool
) -> list[Task]:
    """Questions about the document's first `num_lines` lines."""
    random = source.random("questions", num_tokens, number)
    found = replace(whole, lines=whole.lines[:num_lines], facts=whole.facts[:num_lines])
    tasks = [_recall_task(random, found, depth, num_tokens, in_system) for depth in range(NUM_DEPTHS)]
    question = ask(random, unknown_fact(random, found))
    return [*tasks, Task(kind="unknown", messages=_asked(found, question, in_system), answer=UNKNOWN)]


def _recall_task(random: Random, found: Document, depth: int, num_tokens: int, in_system: bool) -> Task:
    num_lines = len(found.lines)
    fact = found.facts[random.randrange(num_lines * depth // NUM_DEPTHS, num_lines * (depth + 1) // NUM_DEPTHS)]
    return Task(
        kind=f"recall_{num_tokens}",
        messages=_asked(found, ask(random, fact), in_system),
        answer=fact.answer,
        depth=depth,
    )


def _asked(found: Document, question: str, in_system: bool) -> tuple[Message, ...]:
    if in_system:
        return ({"role": "system", "content": found.text}, {"role": "user", "content": question})
    return ({"role": "user", "content": f"{found.text}\n\n{question}"},)
