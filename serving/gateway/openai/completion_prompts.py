"""The prompts of a completion's body: one or several, each a text or a list of token ids.

Also how many of a prompt's likeliest tokens are to be computed where two fields ask for some.
"""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.openai.body import whole_list
from moonshard.serving.gateway.openai.sampling import Number
from moonshard.serving.gateway.request import TextPrompt, TokenPrompt

MAX_PROMPTS = 256  # of one body

type Prompts = str | Sequence[Number | str | list[Number]]


def completion_prompts(prompt: Prompts) -> Mapping[str, TextPrompt | TokenPrompt]:
    """The prompts in their order, by what errors are to call them; at least one.

    InvalidArgument for too many, for token ids beside texts, and for an id that is no integer.
    """
    if isinstance(prompt, str):
        return {"prompt": TextPrompt(prompt)}
    if _are_numbers(prompt):
        return {"prompt": TokenPrompt.of(whole_list("prompt", prompt))}
    if len(prompt) > MAX_PROMPTS:
        raise InvalidArgument(f"prompt: at most {MAX_PROMPTS} prompts, not {len(prompt)}", field="prompt")
    names = ["prompt"] if len(prompt) == 1 else [f"prompt[{index}]" for index in range(len(prompt))]
    return {name: _one(name, each) for name, each in zip(names, prompt, strict=True)}


def most_asked(*numbers: int | None) -> int | None:
    """The largest of those that are asked for; None where nothing is."""
    return max((number for number in numbers if number is not None), default=None)


def _one(name: str, prompt: Number | str | list[Number]) -> TextPrompt | TokenPrompt:
    match prompt:
        case str():
            return TextPrompt(prompt)
        case list():
            return TokenPrompt.of(whole_list(name, prompt))
        case _:
            raise InvalidArgument(f"{name}: a text or a list of token ids stands beside it, not {prompt}", field=name)


def _are_numbers(items: Sequence[object]) -> TypeGuard[Sequence[Number]]:
    """Looks at the set of types: of 262,144 that takes a third of asking each with `isinstance`."""
    return set(map(type, items)) <= {int, float}
