"""What is asked of a tool: arguments that belong to the split, and requests that no declared tool serves."""

from collections.abc import Collection
from random import Random

from moonshard.experiments.training.texts.conversation import Exchange, is_of
from moonshard.experiments.training.texts.tools.tool_library import PURPOSES, Purpose, placeholders
from moonshard.experiments.training.texts.tools.tool_words import Value

Values = tuple[Value, ...]
MAX_DRAWS = 400  # some purposes have five held-out arguments in all: a long conversation meets them again


def draw_values(random: Random, split: str, purpose: Purpose, used: Collection[Values] = ()) -> Values:
    """Arguments of the split; none used before as long as such are easily found."""
    found: Values | None = None
    for _ in range(MAX_DRAWS):
        values = tuple(parameter.value(random) for parameter in purpose.parameters)
        if len(set(values)) < len(values) or not is_of(split, purpose.names[0], *values):
            continue
        found = values
        if values not in used:
            return values
    if found is None:
        raise ValueError(f"no arguments of {purpose.names[0]} belong to {split}")
    return found


def ask(random: Random, purpose: Purpose, values: Values) -> str:
    return random.choice(purpose.questions).format(**placeholders(purpose, values))


def unserved(random: Random, split: str, served: Collection[str] = ()) -> tuple[Exchange, Purpose, Values]:
    """A request for which no tool is declared; `served` are the purposes, by first name, for which one is."""
    purpose = random.choice([one for one in PURPOSES if one.names[0] not in served])
    values = draw_values(random, split, purpose)
    return Exchange(question=ask(random, purpose, values), answer=purpose.without), purpose, values
