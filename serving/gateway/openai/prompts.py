"""What a response shows of its prompts: their text before the answer (`echo`), their ids, their log-probabilities.

OpenAI's `echo` puts a completion's prompt before its text, and with `logprobs` the prompt's tokens before its own;
`prompt_logprobs` is vLLM's. Of the first token nothing is known: its place has null.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonshard.models.tokenizers.tokenizer import Tokenizer
from moonshard.rpc import inference_pb2 as pb
from moonshard.serving.gateway.openai.logprobs import TextOffsets, finite, token_text
from moonshard.serving.gateway.pipeline.choice import PromptEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the client wants to see of the prompts. None: nothing; 0: of each token itself alone."""

    is_echoed: bool = False
    num_echoed_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_prompts: int = 1
    num_choices: int = 1  # of each prompt

    @property
    def is_batch(self) -> bool:
        return self.num_prompts > 1


class _Scored(NamedTuple):
    """A prompt's token, and what may have been said in its place. The likeliest come first, and the token itself last
    where it is not among them.
    """

    token_id: int
    logprob: float
    shown: Sequence[tuple[int, float, int]]  # token, log-probability, rank


@dataclass(slots=True)
class Prompts:
    """The prompts of one response, as their events come. A choice is of prompt `choice // num_choices`."""

    tokenizer: Tokenizer | None
    asked: Asked = field(default_factory=Asked)
    _ids: dict[int, Sequence[int]] = field(default_factory=dict)
    _scores: dict[int, pb.PromptLogprobs] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)

    def add(self, event: PromptEvent, prompt: int = 0) -> None:
        if isinstance(event, pb.TokenIds):
            self._ids[prompt] = event.ids
        else:
            self._scores[prompt] = event

    def ids(self, prompt: int = 0) -> list[int]:
        return list(self._ids[prompt])

    def num_chars(self, choice: int) -> int:
        """How many characters stand before the choice's own text."""
        return len(self._text(choice)) if self.asked.is_echoed else 0

    def with_prompt(self, choice: Mapping[str, object], own_logprobs: Mapping[str, list] | None) -> dict[str, object]:
        """A whole choice of a completion, behind its prompt where that is echoed."""
        index = int(str(choice["index"]))
        told = dict(choice)
        if self.asked.is_echoed:
            told["text"] = self._text(index) + str(choice["text"])
            before = self._echoed_logprobs(index)
            if before is not None and own_logprobs is not None:
                told["logprobs"] = {name: [*before[name], *own_logprobs[name]] for name in before}
        if self.asked.num_prompt_logprobs is not None:
            told["prompt_logprobs"] = self.as_vllm(index // self.asked.num_choices)
        return told

    def opening(self, choice: int) -> dict[str, object] | None:
        """What a stream says of a choice before its own text; None where nothing is echoed."""
        if not self.asked.is_echoed:
            return None
        logprobs = self._echoed_logprobs(choice)
        return {
            "index": choice,
            "text": self._text(choice),
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
        }

    def as_vllm(self, prompt: int = 0) -> list[dict[str, object] | None]:
        """A record of each token's likeliest ones and itself, by token id."""
        scored = self._scored(prompt, self.asked.num_prompt_logprobs or 0)
        return [
            None,
            *(
                {str(token): self._record(token, logprob, rank) for token, logprob, rank in each.shown}
                for each in scored
            ),
        ]

    def _record(self, token: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(self.tokenizer, token)}

    def _text(self, choice: int) -> str:
        prompt = choice // self.asked.num_choices
        if prompt not in self._texts:
            self._texts[prompt] = TextOffsets(self.tokenizer, skip_special=False).whole(self._ids[prompt])
        return self._texts[prompt]

    def _echoed_logprobs(self, choice: int) -> dict[str, list] | None:
        if self.asked.num_echoed_logprobs is None:
            return None
        prompt, offsets = choice // self.asked.num_choices, TextOffsets(self.tokenizer, skip_special=False)
        scored = list(self._scored(prompt, self.asked.num_echoed_logprobs))
        return {
            "tokens": [token_text(self.tokenizer, token) for token in self._ids[prompt]],
            "token_logprobs": [None, *(finite(each.logprob) for each in scored)],
            "top_logprobs": [
                None,
                *(
                    {token_text(self.tokenizer, token): finite(logprob) for token, logprob, _ in each.shown}
                    for each in scored
                ),
            ],
            "text_offset": [offsets.next(token) for token in self._ids[prompt]],
        }

    def _scored(self, prompt: int, num_top: int) -> Iterator[_Scored]:
        """The tokens from the second on. More of the likeliest may have been computed than are to be shown."""
        scores, ids = self._scores[prompt], self._ids[prompt]
        logprobs, ranks = scores.logprobs, scores.ranks
        top_ids, top_logprobs = list(scores.top_ids), list(scores.top_logprobs)
        width = len(top_ids) // max(1, len(logprobs))
        for index, token in enumerate(ids[1:]):
            start = index * width
            end = start + min(width, num_top)
            shown = [
                (top, logprob, rank)
                for rank, (top, logprob) in enumerate(zip(top_ids[start:end], top_logprobs[start:end], strict=True), 1)
            ]
            if all(top != token for top, _, _ in shown):
                shown.append((token, logprobs[index], ranks[index]))
            yield _Scored(token, logprobs[index], shown)
