"""Saying again what was said: a first lesson, for short rows, and the one all others rest on.

Every token of an answer can be found in the question, behind the tokens that were said last.
"""

from random import Random

from moonshard.experiments.training.texts import words
from moonshard.experiments.training.texts.conversation import Conversation, Exchange, is_of
from moonshard.experiments.training.texts.lengths import exchange_tokens
from moonshard.experiments.training.texts.recall import code, extension, item, number, person, price, shelf

WORDS = (
    *words.FIRST_NAMES,
    *words.LAST_NAMES,
    *words.CITIES,
    *words.COLOURS,
    *words.MATERIALS,
    *words.ITEMS,
    *words.FRUITS,
    *words.ANIMALS,
    *words.TEAMS,
    *words.DAYS,
)
MAKERS = (person, item, code, shelf, number, extension, price)
REQUESTS = ("Repeat: ", "Copy this: ", "Say again: ", "Repeat after me: ")
MIN_THINGS, MAX_THINGS = 4, 24


def copy_conversation(random: Random, split: str, num_tokens: int) -> Conversation:
    """Requests to repeat, until the conversation is about so many tokens long."""
    exchanges: list[Exchange] = []
    length = 0
    while length < num_tokens:
        text = _things(random, random.randint(MIN_THINGS, MAX_THINGS))
        if not is_of(split, text):
            continue
        exchanges.append(Exchange(question=random.choice(REQUESTS) + text, answer=text))
        length += exchange_tokens(exchanges[-1])
    return Conversation(exchanges=tuple(exchanges))


def _things(random: Random, count: int) -> str:
    """Words, or things of one kind, in one line or one to a line."""
    join = random.choice((" ", ", ", "; ", "\n- "))
    make = (lambda random: random.choice(WORDS)) if random.random() < 0.5 else random.choice(MAKERS)
    return join.join(make(random) for _ in range(count))
