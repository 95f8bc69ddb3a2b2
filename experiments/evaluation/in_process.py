"""The model answers in this process: template, tokens and calls as the gateway makes them, greedy decoding.

What a gateway answers with an error is that question's `NoReply` here as well.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from moonshard.experiments.common.turns import WrittenCall
from moonshard.experiments.evaluation.replies import Asked, Identity, NoReply, Reply
from moonshard.experiments.training.greedy import GreedyModel
from moonshard.experiments.training.texts.corpus import Text
from moonshard.experiments.training.texts.tools.tasks import MAX_ANSWER_TOKENS, MAX_CONTEXT_TOKENS, prompt_tokens
from moonshard.models.folder.generation import load_generation_defaults
from moonshard.models.tokenizers.tokenizer import TextError, TokenIdError
from moonshard.rpc.codec import whole_calls
from moonshard.serving.chat.detokenizer import Detokenizer
from moonshard.serving.chat.template import TemplateError
from moonshard.serving.chat.tool_calls import ToolCallParser, call_marks

MAX_PROMPT_TOKENS = MAX_CONTEXT_TOKENS - MAX_ANSWER_TOKENS


class InProcess:
    """Answers with the model of a folder. Its constructor raises what a folder that cannot be served raises."""

    def __init__(self, folder: Path, text: Text, dtype: str):
        self._model = GreedyModel(folder, dtype, MAX_CONTEXT_TOKENS)
        self._text = text
        self._stops = load_generation_defaults(folder).stop_token_ids
        self.identity = Identity(model=folder.resolve().name, fingerprint=self._model.fingerprint, dtype=dtype)

    def router_load(self) -> list[float]:
        loads = self._model.expert_loads
        return [float(load) for load in loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1)]

    def answer(self, asked: Sequence[Asked]) -> list[Reply | NoReply]:
        prompts = [prompt_of(self._text, each) for each in asked]
        possible = [prompt for prompt in prompts if not isinstance(prompt, NoReply)]
        answers = iter(self._model.generate(possible, MAX_ANSWER_TOKENS, self._stops))
        return [
            prompt if isinstance(prompt, NoReply) else read(self._text, each, next(answers))
            for each, prompt in zip(asked, prompts, strict=True)
        ]


def prompt_of(text: Text, asked: Asked) -> list[int] | NoReply:
    """The prompt's tokens, or the reason why there can be no answer."""
    try:
        tokens = prompt_tokens(text, asked.messages, asked.tools)
    except (TemplateError, TextError) as error:
        return NoReply(error=str(error))
    if not tokens:
        return NoReply(error="the prompt is empty")
    if len(tokens) > MAX_PROMPT_TOKENS:
        return NoReply(error=f"the prompt has more than {MAX_PROMPT_TOKENS} tokens")
    return tokens


def read(text: Text, asked: Asked, tokens: Sequence[int]) -> Reply:
    """The reply as a client would see it, from the tokens."""
    marks = call_marks(text.tokenizer.special_tokens) if asked.tools else None
    detokenizer = Detokenizer(text.tokenizer, marks=marks)
    pieces: list[str] = []
    for token in tokens:
        with suppress(TokenIdError):  # an id that the model has and the tokenizer has not
            pieces.append(detokenizer.push((token,)).text)
    content = "".join(pieces) + detokenizer.finish()
    if not marks:
        return Reply(content=content)
    parser = ToolCallParser(_functions(asked), _call_ids(asked))
    parsed, rest = parser.push(content), parser.finish()
    calls = whole_calls((*parsed.calls, *rest.calls))
    written = tuple(WrittenCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls)
    return Reply(content=parsed.content + rest.content, calls=written)


def _functions(asked: Asked) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in asked.tools)


def _call_ids(asked: Asked) -> frozenset[str]:
    return frozenset(call["id"] for message in asked.messages for call in message.get("tool_calls", ()))
