"""Documents of facts, and questions about them: ledgers, contact lists, inventories.

Every fact is drawn at random, so that its value can only be known by reading it where it stands: one wrong or lost
block of the KV cache is one wrong answer. An answer repeats the key before the value, in one wording. Besides single
questions there are requests for several facts at once and for the list itself: more supervised tokens for the same
document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from moonshard.experiments.training.texts import words
from moonshard.experiments.training.texts.conversation import Conversation, Exchange, is_of

UNKNOWN = "I don't know."
UNKNOWN_SHARE = 0.12  # of the questions
CHARS_PER_TOKEN = 3.0  # an estimate, for lengths
MAX_MISSES = 100_000  # keys drawn in a row that are there already: then there is no other
Maker = Callable[[Random], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribute:
    label: str
    value: Maker


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    title: str
    key: Maker
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    key: str
    label: str
    value: str

    @property
    def question_subject(self) -> str:
        return f"the {self.label} of {self.key}"

    @property
    def answer(self) -> str:
        return f"The {self.label} of {self.key} is {self.value}."


def person(random: Random) -> str:
    return f"{random.choice(words.FIRST_NAMES)} {random.choice(words.LAST_NAMES)}"


def item(random: Random) -> str:
    return f"{random.choice(words.MATERIALS)} {random.choice(words.ITEMS)}"


def coloured_item(random: Random) -> str:
    return f"{random.choice(words.COLOURS)} {random.choice(words.ITEMS)}"


def code(random: Random) -> str:
    return f"{random.choice(words.LETTERS)}{random.choice(words.LETTERS)}-{random.randrange(10, 100)}"


def place(random: Random) -> str:
    return random.choice(words.CITIES)


def shelf(random: Random) -> str:
    return f"{random.choice(words.LETTERS)}{random.randrange(10, 100)}"


def number(random: Random) -> str:
    return str(random.randrange(10, 1000))


def extension(random: Random) -> str:
    return str(random.randrange(1000, 10_000))


def price(random: Random) -> str:
    return f"${random.randrange(2, 1000)}"


def clock(random: Random) -> str:
    return f"{random.randrange(6, 23)}:{random.randrange(0, 60, 5):02d}"


def one_of(choices: Sequence[str]) -> Maker:
    return lambda random: random.choice(choices)


def _attributes(**values: Maker) -> tuple[Attribute, ...]:
    return tuple(Attribute(label=label, value=value) for label, value in values.items())


DOMAINS = (
    Domain(
        title="Contact list",
        key=person,
        attributes=_attributes(extension=extension, desk=shelf, team=one_of(words.TEAMS), city=place),
    ),
    Domain(
        title="Staff list",
        key=person,
        attributes=_attributes(locker=number, pet=one_of(words.ANIMALS), colour=one_of(words.COLOURS)),
    ),
    Domain(
        title="Ledger",
        key=code,
        attributes=_attributes(amount=price, payer=person, day=one_of(words.DAYS)),
    ),
    Domain(
        title="Inventory",
        key=item,
        attributes=_attributes(count=number, shelf=shelf, price=price),
    ),
    Domain(
        title="Lost and found",
        key=coloured_item,
        attributes=_attributes(owner=person, shelf=shelf, city=place),
    ),
    Domain(
        title="Order book",
        key=code,
        attributes=_attributes(buyer=person, item=item, city=place),
    ),
    Domain(
        title="Time table",
        key=person,
        attributes=_attributes(time=clock, room=shelf, day=one_of(words.DAYS)),
    ),
    Domain(
        title="Lunch list",
        key=person,
        attributes=_attributes(fruit=one_of(words.FRUITS), price=price, table=number),
    ),
)
LINES = (
    "- {key}: {label} {value}",
    "- {label} of {key}: {value}",
    "The {label} of {key} is {value}.",
    "- {key}: {value}",
)
BARE_LINE = 3  # its label stands in the title only
QUESTIONS = (
    "What is {subject}?",
    "Tell me {subject}.",
    "Look up {subject}.",
    "Please find {subject}.",
    "For {key}: which {label}?",
    "I need {subject}.",
)
SEVERAL = ("Give me the {label} of each: {keys}.", "List the {label} for {keys}.")
WHOLE = ("Repeat the list.", "Copy the list.", "Read me the list.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    title: str
    facts: tuple[Fact, ...]
    lines: tuple[str, ...]  # one per fact
    domain: Domain
    labels: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join([self.title, *self.lines])


def document(random: Random, split: str, num_tokens: int) -> Document:
    """A document of about so many tokens, or of all the keys of its kind; keys differ, facts belong to the split."""
    domain = random.choice(DOMAINS)
    num_labels = 1 if random.random() < 0.75 else 2
    attributes = random.sample(domain.attributes, num_labels)
    style = random.randrange(len(LINES)) if num_labels == 1 else 0
    title = f"{domain.title}: {attributes[0].label}" if style == BARE_LINE else domain.title
    facts: list[Fact] = []
    lines: list[str] = []
    keys: set[str] = set()
    length, num_misses = len(title), 0
    while (length < num_tokens * CHARS_PER_TOKEN and num_misses < MAX_MISSES) or not lines:
        key = domain.key(random)
        own = [Fact(key=key, label=attribute.label, value=attribute.value(random)) for attribute in attributes]
        if key in keys or not is_of(split, key, *(fact.value for fact in own)):
            num_misses += 1
            continue
        keys.add(key)
        num_misses = 0
        facts += own
        lines += [LINES[style].format(key=fact.key, label=fact.label, value=fact.value) for fact in own]
        length += sum(len(line) + 1 for line in lines[-len(own) :])
    labels = tuple(attribute.label for attribute in attributes)
    return Document(title=title + "\n", facts=tuple(facts), lines=tuple(lines), domain=domain, labels=labels)


def ask(random: Random, fact: Fact) -> str:
    form = random.choice(QUESTIONS)
    return form.format(subject=fact.question_subject, key=fact.key, label=fact.label)


def unknown_fact(random: Random, found: Document) -> Fact:
    """A key that is not in the document, often with a word in common with one that is.

    ValueError for a document that has all keys of its kind.
    """
    keys = {fact.key for fact in found.facts}
    drawn = (found.domain.key(random) for _ in range(MAX_MISSES))
    key = next((key for key in drawn if key not in keys), None)
    if key is None:
        raise ValueError(f"{found.title.strip()}: it has all keys of its kind")
    return Fact(key=key, label=random.choice(found.labels), value="")


def exchange(random: Random, found: Document) -> Exchange:
    """One question about the document, or a request for several facts."""
    kind = random.random()
    if kind < UNKNOWN_SHARE:
        return Exchange(question=ask(random, unknown_fact(random, found)), answer=UNKNOWN)
    if kind < 0.40 and len(found.facts) > 3:
        label = random.choice(found.labels)
        of_label = [fact for fact in found.facts if fact.label == label]
        asked = random.sample(of_label, min(len(of_label), random.randrange(2, 6)))
        keys = "; ".join(fact.key for fact in asked)
        answer = "\n".join(f"- {fact.key}: {fact.value}" for fact in asked)
        return Exchange(question=random.choice(SEVERAL).format(label=label, keys=keys), answer=answer)
    fact = random.choice(found.facts)
    return Exchange(question=ask(random, fact), answer=fact.answer)


def recall_conversation(random: Random, split: str, num_tokens: int) -> Conversation:
    """A document, then questions until the conversation is about `num_tokens` long."""
    found = document(random, split, int(num_tokens * random.uniform(0.15, 0.7)))
    exchanges: list[Exchange] = []
    if random.random() < 0.12:
        exchanges.append(Exchange(question=random.choice(WHOLE), answer="\n".join(found.lines)))
    in_system = random.random() < 0.3
    length = len(found.text) + sum(len(part.answer) for part in exchanges)
    while length < num_tokens * CHARS_PER_TOKEN:
        exchanges.append(exchange(random, found))
        length += len(exchanges[-1].question) + len(exchanges[-1].answer) + 40
    if in_system:
        return Conversation(system=found.text, exchanges=tuple(exchanges))
    first = exchanges[0]
    opening = Exchange(question=f"{found.text}\n\n{first.question}", answer=first.answer)
    return Conversation(exchanges=(opening, *exchanges[1:]))
