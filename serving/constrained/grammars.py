"""Grammars over one model's tokens: compiled once each, within bounds of time and memory, and kept.

The library is llguidance (https://github.com/guidance-ai/llguidance), an Earley parser over derivatives of regular
expressions. A matcher is one sequence's place in a grammar. All end tokens of the model are the grammar's end: where an
answer may stop, each of them may be drawn.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from moonshard.models.folder.generation import load_generation_defaults

if TYPE_CHECKING:  # a worker whose requests have no grammar shall not wait for these, nor hold them
    from llguidance import LLMatcher, LLTokenizer

    from moonshard.models.tokenizers.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 18
MAX_COMPILE_S = 2.0  # of processor time, the first mask included: what takes longer would hold up others too
MAX_KEPT = 256  # grammars
MAX_KEPT_CHARS = 1 << 22  # of all texts that are kept
MAX_MESSAGE_CHARS = 500
NOTHING_FOLLOWS = "NoExtensionBias"  # the library's word for it
# A fifth to a half of llguidance's own, with which the first mask of `(a{1000}){1000}` took 17 s, and with these 0.2 s.
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL, MAX_GRAMMAR_SIZE = 200_000, 100_000, 100_000


class GrammarError(ValueError):
    """A grammar that cannot be served: one message, for whoever asked for it."""


@final
class Grammars:
    """The grammars of one model. May be used from several threads; what is not kept takes up to seconds to compile."""

    def __init__(self, tokenizer: "Tokenizer", end_ids: Collection[int], vocab_size: int | None = None):
        """`vocab_size`: of the model, whose embedding may have more rows than the tokenizer has tokens.

        GrammarError without an end token: an answer that is complete could not end.
        """
        if not end_ids:
            raise GrammarError("the model's folder names no end token")
        self._tokenizer = tokenizer
        self.end_ids = sorted(end_ids)
        self._vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher | str] = OrderedDict()  # matchers at the beginning, or what is wrong
        self._num_kept_chars = 0
        self._lock = threading.Lock()  # of what is kept
        self._compiling = threading.Lock()  # one at a time

    @property
    def num_mask_words(self) -> int:
        """Of 32 bits, of a mask over all tokens."""
        return -(-self._vocab_size // 32)

    @functools.cached_property
    def end_mask(self) -> np.ndarray:
        """The mask of the end tokens: [words] uint32."""
        words = np.zeros(self.num_mask_words, np.uint32)
        for token_id in self.end_ids:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words

    def has(self, grammar: str) -> bool:
        """Whether `matcher` answers at once."""
        return self._find(grammar) is not None

    def matcher(self, grammar: str) -> "LLMatcher":
        """A new matcher, at the beginning of an answer. Raises GrammarError, for the same text always the same."""
        found = self._find(grammar)
        if found is None:
            with self._compiling:
                found = self._find(grammar)  # another may have compiled it
                found = self._keep(grammar, self._compiled(grammar)) if found is None else found
        if isinstance(found, str):
            raise GrammarError(found)
        return found.deep_copy()

    def _find(self, grammar: str) -> "LLMatcher | str | None":
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _keep(self, grammar: str, found: "LLMatcher | str") -> "LLMatcher | str":
        with self._lock:
            self._kept[grammar] = found
            self._num_kept_chars += len(grammar)
            while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._num_kept_chars > MAX_KEPT_CHARS):
                dropped, _ = self._kept.popitem(last=False)
                self._num_kept_chars -= len(dropped)
        return found

    def _compiled(self, grammar: str) -> "LLMatcher | str":
        """A matcher at the beginning, or why there is none."""
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > MAX_GRAMMAR_CHARS:
            return f"it has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are taken"
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self.end_ids, self._vocab_size)
        begun_s = time.thread_time()
        limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_LEXER_FUEL, step_lexer_fuel=STEP_LEXER_FUEL, max_grammar_size=MAX_GRAMMAR_SIZE
        )
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        fault = _fault(matcher)
        taken_s = time.thread_time() - begun_s
        if fault:
            return shortened(fault)
        if taken_s > MAX_COMPILE_S:
            return f"it is too complex: to compile it took {taken_s:.1f} s, at most {MAX_COMPILE_S:g} may"
        return matcher


def load_grammars(folder: Path, vocab_size: int) -> Grammars:
    """The grammars of a model's folder. GrammarError where it has no tokenizer or no end token, or they cannot be
    read.
    """
    from moonshard.models.tokenizers.tokenizer import load_tokenizer

    try:
        tokenizer, defaults = load_tokenizer(folder), load_generation_defaults(folder)
    except ValueError as error:
        raise GrammarError(str(error)) from error
    if tokenizer is None:
        raise GrammarError("the model has no tokenizer")
    return Grammars(tokenizer, defaults.stop_token_ids, vocab_size)


def _vocabulary(tokenizer: "Tokenizer", end_ids: list[int], vocab_size: int) -> "LLTokenizer":
    """The tokens as llguidance takes them. An id without a token has no bytes, and no grammar allows it."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, end_ids, vocab_size)), eos_token=end_ids)


class _Tokens:
    """The attributes that llguidance asks a tokenizer for."""

    bos_token_id = None

    def __init__(self, tokenizer: "Tokenizer", end_ids: list[int], vocab_size: int):
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        self.special_token_ids = sorted(tokenizer.special_tokens.values())
        self.tokens = list(self._all_bytes(vocab_size))

    def _all_bytes(self, vocab_size: int) -> Iterable[bytes]:
        from moonshard.models.tokenizers.tokenizer import TokenIdError

        for token_id in range(vocab_size):
            try:
                yield self._tokenizer.token_bytes(token_id)
            except TokenIdError:
                yield b""

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _fault(matcher: "LLMatcher") -> str:
    """What is wrong with it, or with its first mask; empty for nothing. A mask that takes too much is still given: the
    next one of any copy is the error.
    """
    for probe in () if matcher.is_error() else (matcher.deep_copy(), matcher.deep_copy()):
        probe.compute_bitmask()
        if probe.is_error():
            return probe.get_error()
    return matcher.get_error() if matcher.is_error() else ""


def shortened(message: str) -> str:
    """The cause, without the grammar's excerpts around it and without a list of all that would have been known."""
    if message.startswith(NOTHING_FOLLOWS):
        return "nothing keeps to it"
    first, *others = message.strip().splitlines() or [""]
    cause = next((line for line in others if line.startswith("error: ")), "")
    return f"{first.partition('; following')[0]} {cause}".strip()[:MAX_MESSAGE_CHARS]
