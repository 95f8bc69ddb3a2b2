"""Grammars over one model's tokens: compiled once each, within bounds of time and memory, and kept.

The library is llguidance (https://github.com/guidance-ai/llguidance), an Earley parser over derivatives of regular
expressions. A matcher is one sequence's place in a grammar. All end tokens of the model are the grammar's end: where an
answer may stop, each of them may be drawn.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from moonshard.models.tokenizers.tokenizer import TokenIdError, Tokenizer

MAX_GRAMMAR_CHARS = 1 << 18
MAX_COMPILE_S = 2.0  # of processor time, the first mask included: what takes longer would hold up others too
MAX_KEPT = 256  # grammars
MAX_KEPT_CHARS = 1 << 22  # of all texts that are kept
MAX_MESSAGE_CHARS = 500
NOTHING_FOLLOWS = "NoExtensionBias"  # the library's word for it
# A tenth of llguidance's own for the lexer and for all rules: with these a mask took 17 s for `(a{1000}){1000}`.
LIMITS: Mapping[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 100_000, "max_grammar_size": 100_000}


class GrammarError(ValueError):
    """A grammar that cannot be served: one message, for whoever asked for it."""


@final
class Grammars:
    """The grammars of one model. May be used from several threads; what is not kept takes up to seconds to compile."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int], vocab_size: int | None = None):
        """`vocab_size`: of the model, whose embedding may have more rows than the tokenizer has tokens.

        ValueError without an end token: an answer that is complete could not end.
        """
        if not end_ids:
            raise ValueError("a model whose folder names no end token has no grammars")
        self._tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher | GrammarError] = OrderedDict()
        self._num_kept_chars = 0
        self._lock = threading.Lock()

    @property
    def num_mask_words(self) -> int:
        """Of 32 bits, of a mask over all tokens."""
        return -(-self._vocab_size // 32)

    def has(self, grammar: str) -> bool:
        """Whether `matcher` would answer at once."""
        with self._lock:
            return grammar in self._kept

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher, at the beginning of an answer. Raises GrammarError, for the same text always the same."""
        with self._lock:
            if grammar not in self._kept:
                self._keep(grammar, self._compiled(grammar))
            self._kept.move_to_end(grammar)
            found = self._kept[grammar]
            if isinstance(found, GrammarError):
                raise found
            return found.deep_copy()

    def _keep(self, grammar: str, found: "LLMatcher | GrammarError") -> None:
        self._kept[grammar] = found
        self._num_kept_chars += len(grammar)
        while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._num_kept_chars > MAX_KEPT_CHARS):
            dropped, _ = self._kept.popitem(last=False)
            self._num_kept_chars -= len(dropped)

    def _compiled(self, grammar: str) -> "LLMatcher | GrammarError":
        if len(grammar) > MAX_GRAMMAR_CHARS:
            return GrammarError(f"it has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._end_ids, self._vocab_size)
        begun_s = time.thread_time()
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        fault = _fault(matcher)
        taken_s = time.thread_time() - begun_s
        if fault:
            return GrammarError(_shortened(fault))
        if taken_s > MAX_COMPILE_S:
            return GrammarError(f"it is too complex: to compile it took {taken_s:.1f} s, at most {MAX_COMPILE_S:g} may")
        return matcher


def _vocabulary(tokenizer: Tokenizer, end_ids: list[int], vocab_size: int) -> LLTokenizer:
    """The tokens as llguidance takes them. An id without a token has no bytes, and no grammar allows it."""
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, end_ids, vocab_size)), eos_token=end_ids)


class _Tokens:
    """The attributes that llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int], vocab_size: int):
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.special_token_ids = sorted(tokenizer.special_tokens.values())
        self.tokens = list(self._all_bytes(vocab_size))

    def _all_bytes(self, vocab_size: int) -> Iterable[bytes]:
        for token_id in range(vocab_size):
            try:
                yield self._tokenizer.token_bytes(token_id)
            except TokenIdError:
                yield b""

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _fault(matcher: LLMatcher) -> str:
    """What is wrong with it, or with its first mask; empty for nothing. A mask that takes too much is still given: the
    next one of any copy is the error.
    """
    for probe in () if matcher.is_error() else (matcher.deep_copy(), matcher.deep_copy()):
        probe.compute_bitmask()
        if probe.is_error():
            return probe.get_error()
    return matcher.get_error() if matcher.is_error() else ""


def _shortened(message: str) -> str:
    """The cause, without the grammar's excerpts around it and without a list of all that would have been known."""
    if message.startswith(NOTHING_FOLLOWS):
        return "nothing keeps to it"
    first, *others = message.strip().splitlines() or [""]
    cause = next((line for line in others if line.startswith("error: ")), "")
    return f"{first.partition('; following')[0]} {cause}".strip()[:MAX_MESSAGE_CHARS]
