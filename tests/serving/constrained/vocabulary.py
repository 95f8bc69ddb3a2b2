"""The embedded model's tokens, and what a grammar says of a sequence of them."""

from pathlib import Path

import numpy as np

from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.serving.chat.tool_calls import NAMES
from moonshard.serving.constrained.grammars import Grammars

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "models" / "pocket")
assert TOKENIZER is not None
SPECIALS = TOKENIZER.special_tokens
END_IDS = frozenset(SPECIALS[name] for name in ("<|im_end|>", "[EOS]"))
SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = NAMES.values()


def tokens_of(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text, allow_special=True)


def call(call_id: str, arguments: str = "{}") -> str:
    return f"{CALL_BEGIN}functions.{call_id}{ARGUMENTS_BEGIN}{arguments}{CALL_END}"


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


def new_grammars() -> Grammars:
    assert TOKENIZER is not None
    return Grammars(TOKENIZER, END_IDS)


def accepted(grammars: Grammars, grammar: str, *answer: str) -> str | None:
    """The beginning of the answer that the masks allow; None where that is all of it and it may end there.

    Of an answer in pieces the one in the middle is a client's text, which has no special tokens.
    """
    assert TOKENIZER is not None
    matcher = grammars.matcher(grammar)
    token_ids = [
        token_id
        for place, piece in enumerate(answer)
        for token_id in (TOKENIZER.encode(piece) if place == 1 else tokens_of(piece))
    ]
    for place, token_id in enumerate([*token_ids, None]):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if token_id is None:
            ends = {end_id for end_id in END_IDS if mask[end_id]}
            assert ends in (set(), END_IDS)
            return None if ends else "".join(answer)
        if not mask[token_id]:
            return TOKENIZER.decode(token_ids[:place], skip_special=False)
        assert matcher.consume_token(token_id)
    return None
