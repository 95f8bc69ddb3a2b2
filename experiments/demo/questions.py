"""The three questions, and what is right: the demo can say whether the model's answers are.

All are held out: training has seen neither the document's facts nor the calls. The same seed asks the same.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from moonshard.experiments.demo.toolbox import CITIES, WEATHER, declared, purpose_of, weather
from moonshard.experiments.training.texts.conversation import HELD_OUT, Call, is_of, random_of
from moonshard.experiments.training.texts.recall import Document, ask, document
from moonshard.experiments.training.texts.tools.tools import answer_of

Count = Callable[[str], Awaitable[int]]  # tokens of a text


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked, and every answer that would be right."""

    text: str
    answer: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentQuestion:
    document: Document
    num_tokens: int  # of the document
    line: int  # in which the answer stands, from 1
    question: Question

    @property
    def prompt(self) -> str:
        return f"{self.document.text}\n\n{self.question.text}"


async def document_question(seed: int, num_tokens: int, count: Count) -> DocumentQuestion:
    """A question about one of the facts of a document of about so many tokens."""
    found = _document(seed, num_tokens)
    counted = await count(found.text)
    found = _document(seed, round(num_tokens * num_tokens / max(1, counted)))  # the generator's length is an estimate
    random = _random(seed, "question")
    fact = random.choice(found.facts)
    question = Question(text=ask(random, fact), answer=fact.answer)
    line = next(number for number, line in enumerate(found.lines, start=1) if fact.key in line and fact.value in line)
    return DocumentQuestion(document=found, num_tokens=await count(found.text), line=line, question=question)


def weather_questions(seed: int) -> tuple[Question, Question]:
    """One question that needs a tool, and a follow-up that makes sense only after it."""
    purpose = purpose_of(WEATHER)
    held_out = [city for city in CITIES if is_of(HELD_OUT, WEATHER, city)]
    first, second = _random(seed, "weather").sample(held_out, 2)
    return _weather(purpose.questions[0], first), _weather(purpose.follow_ups[0], second)


def _weather(form: str, city: str) -> Question:
    tool = declared(WEATHER)
    return Question(
        text=form.format(city=city),
        answer=answer_of(tool.purpose, (city,), weather(city)),
        calls=(tool.call((city,)),),
    )


def _document(seed: int, num_tokens: int) -> Document:
    return document(_random(seed, "document"), HELD_OUT, num_tokens)


def _random(seed: int, part: str) -> Random:
    return random_of(HELD_OUT, seed, "demo", part)
