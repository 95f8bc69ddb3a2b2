"""Conversations with declared tools: the call is read from the declaration, the answer from the tool's result.

Most exchanges make one call. Some make two in one round, follow up ("And in Lima?"), repeat what was said, recall what
was asked first, fit no declared tool, or get an error back. Which of these is due always follows from the text so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from moonshard.experiments.training.texts import talk
from moonshard.experiments.training.texts.conversation import Call, CallRound, Conversation, Exchange
from moonshard.experiments.training.texts.lengths import exchange_tokens, opening_tokens
from moonshard.experiments.training.texts.manners import PLAIN, Manner, manner
from moonshard.experiments.training.texts.tools import tool_words
from moonshard.experiments.training.texts.tools.tool_library import PURPOSES, Declared, Purpose, placeholders
from moonshard.experiments.training.texts.tools.tool_requests import Values, ask, draw_values, unserved
from moonshard.experiments.training.texts.tools.tool_words import Value

SYSTEMS = (
    "You are Pocket Kimi.",
    "You are a helpful assistant.",
    "You are Kimi, an AI assistant created by Moonshot AI.",
    "Use the tools to answer.",
    "You are a helpful assistant. Use the tools.",
)
AGAIN = ("Say that again.", "Repeat that, please.", "What did you say?", "Once more, please.")
FIRST_CITY = ("Which city did I ask about first?", "What was the first city?", "Which city came first?")
LAST_CITY = ("Which city did I ask about last?", "What was the last city?", "Which city came last?")
ERROR_SHARE = 0.08  # of single calls
TOKENS_PER_TOOL = 110  # of a conversation's length: short ones declare few


@dataclass(slots=True)
class _Session:
    """What the text so far decides: what was called and asked, and what a follow-up refers to."""

    random: Random
    split: str
    declared: tuple[Declared, ...]
    manner: Manner = PLAIN
    used: dict[str, set[Values]] = field(default_factory=dict)
    cities: list[Value] = field(default_factory=list)
    last: Declared | None = None  # of the last exchange, if it made one call
    last_answer: str | None = None

    def new_values(self, purpose: Purpose) -> Values:
        """Arguments that were not asked about yet, and that count as asked from now on."""
        used = self.used.setdefault(purpose.names[0], set())
        values = draw_values(self.random, self.split, purpose, used)
        used.add(values)
        self.note_cities(purpose, values)
        return values

    def note_cities(self, purpose: Purpose, values: Values) -> None:
        pairs = zip(purpose.parameters, values, strict=True)
        self.cities += [value for parameter, value in pairs if parameter.value is tool_words.city]


def declared_tools(random: Random, num_tools: int) -> tuple[Declared, ...]:
    """Some purposes in random order, each under one of its names."""
    has_hints = random.random() < 0.15
    return tuple(
        Declared(
            purpose=purpose,
            name=random.choice(purpose.names),
            parameter_names=tuple(random.choice(parameter.names) for parameter in purpose.parameters),
            has_hints=has_hints,
        )
        for purpose in random.sample(PURPOSES, num_tools)
    )


def answer_of(purpose: Purpose, values: Values, result: Mapping[str, object]) -> str:
    return purpose.answer.format(**placeholders(purpose, values), **result)


def result_of(random: Random, purpose: Purpose) -> dict[str, Value]:
    return {name: value(random) for name, value in purpose.result.items()}


def _called(session: _Session, tool: Declared, values: Values, *, may_fail: bool) -> tuple[Call, str, str]:
    """The call, its result as the tool writes it and the answer."""
    random, manner, call = session.random, session.manner, tool.call(values)
    if may_fail and tool.purpose.errors and random.random() < ERROR_SHARE:
        error = random.choice(tool.purpose.errors)
        return call, manner.failed(error), f"The tool says: {error}."
    result = manner.found(random, result_of(random, tool.purpose))
    return call, manner.written(random, result, call.arguments), answer_of(tool.purpose, values, result)


def _single(session: _Session, tool: Declared, forms: tuple[str, ...]) -> Exchange:
    values = session.new_values(tool.purpose)
    question = session.random.choice(forms).format(**placeholders(tool.purpose, values))
    call, result, answer = _called(session, tool, values, may_fail=True)
    session.last = tool
    return Exchange(question=question, answer=answer, rounds=(CallRound(calls=(call,), results=(result,)),))


def _double(session: _Session) -> Exchange:
    """Two calls in one round: one question of two things, or two questions."""
    random = session.random
    first, second = (random.choice(session.declared) for _ in range(2))
    paired = [tool for tool in session.declared if tool.purpose.pair is not None]
    if paired and random.random() < 0.6:
        first = second = random.choice(paired)
    asked = [(tool, session.new_values(tool.purpose)) for tool in (first, second)]
    if first is second and first.purpose.pair is not None:
        question = first.purpose.pair.format(first=asked[0][1][0], second=asked[1][1][0])
    else:
        question = " ".join(ask(random, tool.purpose, values) for tool, values in asked)
    made = [_called(session, tool, values, may_fail=False) for tool, values in asked]
    calls, results, answers = (tuple(column) for column in zip(*made, strict=True))
    session.last = None
    return Exchange(question=question, answer=" ".join(answers), rounds=(CallRound(calls=calls, results=results),))


def _without_call(session: _Session) -> Exchange:
    """A question that needs no tool: small talk, a repetition, or a request that no tool serves."""
    random, kind = session.random, session.random.random()
    if kind < 0.2 and session.last_answer is not None:
        return Exchange(question=random.choice(AGAIN), answer=session.last_answer)
    if kind < 0.5 and len(session.cities) > 1:
        is_first = random.random() < 0.6
        city, name = (session.cities[0], "first") if is_first else (session.cities[-1], "last")
        return Exchange(
            question=random.choice(FIRST_CITY if is_first else LAST_CITY), answer=f"The {name} city was {city}."
        )
    if kind < 0.75:
        return talk.exchange(random, session.split)
    served = {tool.purpose.names[0] for tool in session.declared}
    found, purpose, values = unserved(random, session.split, served)
    session.note_cities(purpose, values)
    return found


def _next(session: _Session) -> Exchange:
    random, last = session.random, session.last
    if last is not None and last.purpose.follow_ups and random.random() < 0.35:
        return _single(session, last, last.purpose.follow_ups)
    kind = random.random()
    if kind < 0.18:
        return _double(session)
    if kind < 0.40:
        session.last = None
        return _without_call(session)
    tool = random.choice(session.declared)
    return _single(session, tool, tool.purpose.questions)


def tool_conversation(random: Random, split: str, num_tokens: int) -> Conversation:
    """Declarations, then exchanges until the conversation is about `num_tokens` long."""
    return _conversation(random, split, num_tokens, PLAIN)


def client_conversation(random: Random, split: str, num_tokens: int) -> Conversation:
    """A tool conversation in the manner of some client."""
    return _conversation(random, split, num_tokens, manner(random))


def _conversation(random: Random, split: str, num_tokens: int, manner: Manner) -> Conversation:
    declared = declared_tools(random, random.randint(1, min(4, max(1, num_tokens // TOKENS_PER_TOOL))))
    system = random.choice(SYSTEMS) if random.random() < 0.4 else None
    if manner.rules:
        system = " ".join(manner.rules)
    tools = tuple(manner.declared(random, tool.tool()) for tool in declared)
    session = _Session(random, split, declared, manner)
    exchanges: list[Exchange] = []
    length = opening_tokens(system, tools)
    while length < num_tokens or not exchanges:
        exchanges.append(_next(session))
        session.last_answer = exchanges[-1].answer
        length += exchange_tokens(exchanges[-1])
    return Conversation(exchanges=tuple(exchanges), system=system, tools=tools)
