"""Work that would block the event loop runs off it: long prompts of every kind, and many ids to turn into text."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from moonshard.serving.gateway.pipeline.model import LONG_TEXT_CHARS, PromptLimit, ServedModel, load_served_model
from moonshard.serving.gateway.request import ChatPrompt, GenerationRequest, TextPrompt
from tests.serving.gateway.conftest import FIXTURE

HI = {"role": "user", "content": "hi"}
LONG = [
    TextPrompt("x" * (LONG_TEXT_CHARS + 1)),
    ChatPrompt([HI | {"content": "x" * LONG_TEXT_CHARS}]),
    ChatPrompt([HI | {"name": "x" * LONG_TEXT_CHARS}]),
    ChatPrompt([HI] * 1_000),
    ChatPrompt([HI], {"tools": [{"name": "x" * LONG_TEXT_CHARS}]}),
    ChatPrompt([HI], {"system": "x" * LONG_TEXT_CHARS}),
]
SHORT = [TextPrompt("x"), ChatPrompt([HI]), ChatPrompt([HI], {"thinking": False, "level": "high"})]


@dataclass
class Recorder:
    """In the place of both tokenizer and template: notes which threads it worked on."""

    threads: list[threading.Thread] = field(default_factory=list)

    max_token_bytes = 1000
    thinking_switch = None
    writes_thoughts = may_keep_thoughts = False

    def note(self, *_what: object, **_how: object) -> list[int]:
        self.threads.append(threading.current_thread())
        return [1]

    encode = encode_chat = decode = note


def recorded() -> tuple[Recorder, ServedModel]:
    recorder = Recorder()
    double: Any = recorder
    model = replace(load_served_model(FIXTURE, "kimi"), tokenizer=double, template=double)
    return recorder, model


@pytest.mark.parametrize("prompt", LONG, ids=["text", "content", "name", "messages", "kwargs", "text of kwargs"])
async def test_a_prompt_that_may_be_long_is_not_tokenised_on_the_event_loop(prompt):
    recorder, model = recorded()
    await model.tokenize(GenerationRequest(request_id="", received_ns=0, prompt=prompt), PromptLimit.to_generate(1000))
    assert len(recorder.threads) == 1
    assert recorder.threads != [threading.current_thread()]


@pytest.mark.parametrize("prompt", SHORT, ids=["text", "chat", "switches"])
async def test_a_short_prompt_costs_no_thread(prompt):
    recorder, model = recorded()
    await model.tokenize(GenerationRequest(request_id="", received_ns=0, prompt=prompt), PromptLimit.to_generate(1000))
    assert recorder.threads == [threading.current_thread()]


@pytest.mark.parametrize("num_tokens", [1, LONG_TEXT_CHARS + 1])
async def test_many_ids_are_not_spelt_out_on_the_event_loop(num_tokens: int):
    recorder, model = recorded()
    await model.detokenize([1] * num_tokens, num_tokens, field="ids")
    assert (recorder.threads == [threading.current_thread()]) == (num_tokens == 1)
