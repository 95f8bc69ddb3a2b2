"""Words and values that only tools and agents speak of, beside `words`. Small lists: each word is met often."""

from collections.abc import Sequence
from random import Random

from moonshard.experiments.training.texts import words

Value = str | int

SKIES = ["sunny", "rainy", "cloudy", "windy", "foggy", "snowy"]
CURRENCIES = ["euros", "pounds", "francs", "yen", "pesos", "rupees"]
ORDER_STATES = ("on the way", "packed", "delivered", "late", "lost", "paid")
LANGUAGES = ["French", "German", "Spanish", "Italian", "Greek", "Latin", "Dutch", "Danish"]
ROOMS = ["kitchen", "garage", "bedroom", "office", "cellar", "attic", "hall", "garden", "library", "studio"]
SYLLABLES = ["ka", "lo", "mi", "ra", "tu", "ne", "si", "po", "va", "de"]
CHORES = (
    "buy a {item}",
    "paint the {item}",
    "return the {item}",
    "call {name}",
    "write to {name}",
    "meet {name} on {day}",
    "bring the {item} to {name}",
)


def city(random: Random) -> str:
    return random.choice(words.CITIES)


def person(random: Random) -> str:
    return f"{random.choice(words.FIRST_NAMES)} {random.choice(words.LAST_NAMES)}"


def item(random: Random) -> str:
    return f"{random.choice(words.MATERIALS)} {random.choice(words.ITEMS)}"


def fruit(random: Random) -> str:
    return random.choice(words.FRUITS)


def day(random: Random) -> str:
    return random.choice(words.DAYS)


def code(random: Random) -> str:
    return f"{random.choice(words.LETTERS)}{random.choice(words.LETTERS)}-{random.randrange(10, 100)}"


def place_code(random: Random) -> str:
    """A gate, a shelf, a room: one letter and two digits."""
    return f"{random.choice(words.LETTERS)}{random.randrange(10, 100)}"


def clock(random: Random) -> str:
    return f"{random.randrange(6, 23)}:{random.randrange(0, 60, 5):02d}"


def chore(random: Random) -> str:
    """A short thing to do or to say, in the imperative, without a full stop."""
    form = random.choice(CHORES)
    return form.format(
        item=random.choice(words.ITEMS), name=random.choice(words.FIRST_NAMES), day=random.choice(words.DAYS)
    )


def song(random: Random) -> str:
    return f"{random.choice(words.COLOURS).capitalize()} {random.choice(words.ANIMALS).capitalize()}"


def book(random: Random) -> str:
    return f"The {random.choice(words.MATERIALS).capitalize()} {random.choice(words.ITEMS).capitalize()}"


def foreign_word(random: Random) -> str:
    return "".join(random.choice(SYLLABLES) for _ in range(random.randrange(2, 4)))


class Between:
    """A maker of integers, both ends included."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, random: Random) -> int:
        return random.randint(self.low, self.high)


class OneOf:
    """A maker of one of some words."""

    def __init__(self, choices: Sequence[str]) -> None:
        self.choices = choices

    def __call__(self, random: Random) -> str:
        return random.choice(self.choices)
