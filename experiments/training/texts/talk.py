"""Small talk: what the model is and can do, greetings, what the user said of themself, and what it cannot know.

Training meets every phrasing of every topic but the held-out ones; a fact about the user is drawn like any other fact.
"""

from dataclasses import dataclass, field
from random import Random

from moonshard.experiments.training.texts.conversation import Conversation, Exchange, is_of, pick
from moonshard.experiments.training.texts.lengths import exchange_tokens
from moonshard.experiments.training.texts.recall import UNKNOWN
from moonshard.experiments.training.texts.talk_topics import (
    ASKING,
    GREETINGS,
    TELLING,
    TOPICS,
    USER_FACTS,
    UserFact,
    outside,
)
from moonshard.experiments.training.texts.tools.tool_requests import unserved


@dataclass(slots=True)
class _Told:
    """What the user has said about themself, by label."""

    facts: dict[str, object] = field(default_factory=dict)

    def tell(self, random: Random, split: str, fact: UserFact) -> Exchange:
        value = fact.value(random)
        while not is_of(split, fact.label, value):
            value = fact.value(random)
        self.facts[fact.label] = value
        question = random.choice(TELLING).format(label=fact.label, value=value)
        return Exchange(question=question, answer=self.answer(fact.label))

    def ask(self, random: Random, label: str) -> Exchange:
        return Exchange(question=random.choice(ASKING).format(label=label), answer=self.answer(label))

    def answer(self, label: str) -> str:
        return f"Your {label} is {self.facts[label]}." if label in self.facts else UNKNOWN


def exchange(random: Random, split: str) -> Exchange:
    """A question about the model, or a greeting."""
    topic = random.choice(TOPICS if random.random() < 0.8 else GREETINGS)
    return Exchange(question=pick(random, split, topic.phrasings, topic.answer), answer=topic.answer)


def outside_exchange(random: Random, split: str) -> Exchange:
    """A question about the world, which the model answers by saying that it does not know."""
    question = outside(random)
    while not is_of(split, question):
        question = outside(random)
    return Exchange(question=question, answer=UNKNOWN)


def _about_user(random: Random, split: str, told: _Told) -> Exchange:
    """Mostly facts told and asked for; now and then one is asked for that was not told."""
    untold = [fact for fact in USER_FACTS if fact.label not in told.facts]
    kind = random.random()
    if untold and kind < 0.12:
        return told.ask(random, random.choice(untold).label)
    if untold and (kind < 0.5 or not told.facts):
        return told.tell(random, split, random.choice(untold))
    return told.ask(random, random.choice(list(told.facts)))


def _next(random: Random, split: str, told: _Told) -> Exchange:
    kind = random.random()
    if kind < 0.5:
        return exchange(random, split)
    if kind < 0.65:
        return outside_exchange(random, split)
    if kind < 0.72:
        return unserved(random, split)[0]
    return _about_user(random, split, told)


def talk_conversation(random: Random, split: str, num_tokens: int) -> Conversation:
    """Small talk until it is about `num_tokens` long; no tools are declared."""
    told = _Told()
    exchanges: list[Exchange] = []
    length = 0
    while length < num_tokens or not exchanges:
        exchanges.append(_next(random, split, told))
        length += exchange_tokens(exchanges[-1])
    return Conversation(exchanges=tuple(exchanges))
