"""Log-probabilities in OpenAI's two formats: a list of records for chats, parallel lists for completions.

A token is shown as the text of its own bytes, which may be half a character: chats also get the bytes.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import final

from moonshard.models.tokenizers.tokenizer import TokenIdError, Tokenizer
from moonshard.rpc.inference_pb2 import PositionLogprobs, TokenLogprob
from moonshard.serving.chat.detokenizer import Detokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


@final
class TextOffsets:
    """Where each token of one choice begins in the text that the client gets, in characters.

    A token in the middle of a character begins where that character does, and hidden ones take no place. Where a stop
    string cut the text off, those that it is made of begin at its end or beyond.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special: bool = True, start: int = 0) -> None:
        """Without a tokenizer there is no text, and every token begins at `start`, as the first one does."""
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, skip_special=skip_special)
        self._offset = start

    def next(self, token_id: int) -> int:
        """The offset of this token, which follows those that were asked for before."""
        offset = self._offset
        if self._detokenizer is not None:
            with suppress(TokenIdError):
                self._offset += len(self._detokenizer.push_token(token_id))
        return offset

    def whole(self, token_ids: Iterable[int]) -> str:
        """The text of tokens that nothing follows; whoever asks for it asks for no offset."""
        if self._detokenizer is None:
            return ""
        pieces: list[str] = []
        for token_id in token_ids:
            with suppress(TokenIdError):
                pieces.append(self._detokenizer.push_token(token_id))
        return "".join(pieces) + self._detokenizer.finish()


def chat_logprobs(tokenizer: Tokenizer | None, positions: Iterable[PositionLogprobs]) -> dict[str, object]:
    content = [
        _record(tokenizer, position.chosen) | {"top_logprobs": [_record(tokenizer, top) for top in position.top]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer | None, positions: Iterable[PositionLogprobs], offsets: TextOffsets
) -> dict[str, list]:
    """`offsets`: of the choice's tokens, from these positions' first on."""
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    text_offset: list[int] = []
    for position in positions:
        token = token_text(tokenizer, position.chosen.token_id)
        tokens.append(token)
        token_logprobs.append(finite(position.chosen.logprob))
        shown = (*position.top, position.chosen)  # the chosen one is always among them, as vLLM has it
        top_logprobs.append({token_text(tokenizer, t.token_id): finite(t.logprob) for t in shown})
        text_offset.append(offsets.next(position.chosen.token_id))
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": text_offset,
    }


def _record(tokenizer: Tokenizer | None, token: TokenLogprob) -> dict[str, object]:
    spelt = _bytes(tokenizer, token.token_id)
    return {
        "token": _text(spelt, token.token_id),
        "logprob": finite(token.logprob),
        "bytes": None if spelt is None else list(spelt),
    }


def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes | None:
    """None where the token has no text: no tokenizer, or an id that only the model has."""
    if tokenizer is None:
        return None
    try:
        return tokenizer.token_bytes(token_id)
    except TokenIdError:
        return None


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return _text(_bytes(tokenizer, token_id), token_id)


def _text(spelt: bytes | None, token_id: int) -> str:
    return f"token_id:{token_id}" if spelt is None else spelt.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
