"""Rows of tokens to train on, each a conversation as the chat template renders it.

What a step sees depends on split, seed and step alone, so that a run that was killed goes on with the same data. Only
what the assistant says is the lesson; the rest counts a little, for the sake of the embeddings. Positions have gaps
(PoSE, arXiv 2309.10400, section 3): a row of 512 tokens meets the distances of the whole context, which only a row of
8,192 would meet otherwise.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from moonshard.experiments.training.run.recipe import ANSWER_WEIGHT, Rows, TrainingStage
from moonshard.experiments.training.shape import MAX_POSITIONS
from moonshard.experiments.training.texts.conversation import Conversation, random_of
from moonshard.experiments.training.texts.copying import copy_conversation
from moonshard.experiments.training.texts.recall import recall_conversation
from moonshard.experiments.training.texts.talk import talk_conversation
from moonshard.experiments.training.texts.tools.agents import agent_conversation
from moonshard.experiments.training.texts.tools.tools import client_conversation, tool_conversation
from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.chat.template import ChatTemplate, load_chat_template

Generator = Callable[[Random, str, int], Conversation]
Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens [t + 1], weights [t], positions [t], as in `Rows`


@dataclass(frozen=True, kw_only=True, slots=True)
class Skill:
    generator: Generator
    share: float  # relative weight among the skills that fit the row
    min_tokens: int = 0  # of a row that it fits into: declarations of tools are long
    max_tokens: int = MAX_POSITIONS  # of a row that it still teaches something


SKILLS: dict[str, Skill] = {
    "recall": Skill(generator=recall_conversation, share=0.60),
    "tools": Skill(generator=tool_conversation, share=0.24, min_tokens=256),
    "agents": Skill(generator=agent_conversation, share=0.10, min_tokens=512),
    "clients": Skill(generator=client_conversation, share=0.0, min_tokens=256),  # where a stage asks for it
    "talk": Skill(generator=talk_conversation, share=0.06),
    "copying": Skill(generator=copy_conversation, share=0.06, max_tokens=512),
}
CONTEXT_WEIGHT = 0.1  # of tokens that are not the assistant's
POCKET = Path(__file__).resolve().parents[3] / "models" / "pocket"


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A tokenizer and a template, which turn conversations into tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, conversation: Conversation) -> list[int]:
        tools = list(conversation.tools) or None
        return self.template.encode_chat(
            self.tokenizer, conversation.messages(), template_kwargs={"tools": tools}, add_generation_prompt=False
        )


@cache
def pocket_text() -> Text:
    """The embedded model's tokenizer and template."""
    tokenizer, template = load_tokenizer(POCKET), load_chat_template(POCKET)
    if tokenizer is None or template is None:
        raise ValueError(f"{POCKET}: no tokenizer or no chat template")
    return Text(tokenizer=tokenizer, template=template)


def draw(random: Random, split: str, num_tokens: int, shares: Mapping[str, float] | None = None) -> Conversation:
    """A conversation of a random skill among those that fit.

    Args:
        shares: relative weights of the skills, by name; none: their own.
    """
    shares = shares or {name: skill.share for name, skill in SKILLS.items()}
    fitting = [name for name in shares if SKILLS[name].min_tokens <= num_tokens <= SKILLS[name].max_tokens]
    name = random.choices(fitting, [shares[name] for name in fitting])[0]
    return SKILLS[name].generator(random, split, num_tokens)


def texts_of(conversation: Conversation) -> Iterator[str]:
    """Every piece of text that the template renders between special tokens."""
    if conversation.tools:
        yield from ("tool_declare", json.dumps(conversation.tools, ensure_ascii=False, separators=(",", ":")))
    for message in conversation.messages():
        yield message["role"]
        content = message["content"] or ""
        yield f"## Return of {message['tool_call_id']}\n{content}" if message["role"] == "tool" else content
        for call in message.get("tool_calls", ()):
            yield from (call["id"], call["function"]["arguments"])


def batch(split: str, seed: int, step: int, stage: TrainingStage, text: Text | None = None) -> Rows:
    """The rows of one step."""
    text = text or pocket_text()
    return stacked(_row(random_of(split, seed, step, row), split, stage, text) for row in range(stage.num_rows))


def stacked(rows: Iterable[Row]) -> Rows:
    """Rows of one length, at least one of them."""
    tokens, weights, positions = (np.stack(parts) for parts in zip(*rows, strict=True))
    return Rows(tokens=tokens, weights=weights, positions=positions)


def _row(random: Random, split: str, stage: TrainingStage, text: Text) -> Row:
    conversation = draw(random, split, stage.num_tokens, dict(stage.shares))
    tokens, weights = lesson(text, conversation, stage.num_tokens, stage.call_weight)
    is_gapped = random.random() < stage.gapped_share
    return tokens, weights, _positions(random, stage.num_tokens, is_gapped)


def lesson(
    text: Text, conversation: Conversation, num_tokens: int, call_weight: float = ANSWER_WEIGHT
) -> tuple[np.ndarray, np.ndarray]:
    """A conversation's tokens [num_tokens + 1], cut or padded, and the weight of each prediction [num_tokens]."""
    ids = np.array(text.encode(conversation)[: num_tokens + 1], np.int32)
    weights = np.where(spoken(ids, text.tokenizer), ANSWER_WEIGHT, CONTEXT_WEIGHT)
    weights = np.where(called(ids, text.tokenizer), call_weight, weights).astype(np.float32)[1:]
    missing = num_tokens + 1 - len(ids)
    pad = text.tokenizer.special_tokens["[PAD]"]
    return np.pad(ids, (0, missing), constant_values=pad), np.pad(weights, (0, missing))


def spoken(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Which tokens the assistant says: those after its <|im_middle|>, up to and including <|im_end|>."""
    specials = tokenizer.special_tokens
    start, middle, end = specials["<|im_assistant|>"], specials["<|im_middle|>"], specials["<|im_end|>"]
    found = np.zeros(len(ids), bool)
    is_assistant = speaks = False
    for index, token in enumerate(ids.tolist()):
        found[index] = speaks
        if token == start:
            is_assistant = True
        elif token == middle:
            speaks = is_assistant
        elif token == end:
            is_assistant = speaks = False
    return found


def called(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Which tokens belong to a call: between <|tool_call_begin|> and <|tool_call_end|>, the latter included."""
    begins = ids == tokenizer.special_tokens["<|tool_call_begin|>"]
    ends = ids == tokenizer.special_tokens["<|tool_call_end|>"]
    depth = np.cumsum(begins) - np.cumsum(ends)
    return ((depth > 0) & ~begins) | ends


def _positions(random: Random, num_tokens: int, is_gapped: bool) -> np.ndarray:
    positions = np.arange(num_tokens, dtype=np.int32)
    room = MAX_POSITIONS - num_tokens
    if not is_gapped or room <= 0:
        return positions
    num_gaps = random.randrange(1, 4)
    span = int(room * random.random() ** 2)  # short spans more often
    cuts = sorted(random.randrange(span + 1) for _ in range(num_gaps))
    for at, until, since in zip(sorted(random.sample(range(1, num_tokens), num_gaps)), cuts, [0, *cuts], strict=False):
        positions[at:] += until - since
    return positions
