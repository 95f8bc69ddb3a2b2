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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from moonshard.models.folder.generation import load_generation_defaults

if TYPE_CHECKING:  # a worker whose requests have no grammar shall not wait for these, nor hold them
    from llguidance import LLMatcher, LLTokenizer

    from moonshard.models.tokenizers.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 18
MAX_COMPILE_S = 2.0  # of processor time, the first mask included: what takes longer would hold up others too
MAX_KEPT = 64  # grammars
MAX_KEPT_CHARS = 1 << 22  # of all texts that are kept
MAX_KEPT_S = 4.0  # that all which are kept took to compile: what took half a second takes some 30 MB
# All matchers of a grammar share a lexer, whose states only become more: at llguidance's 250,000 it fails for all.
MAX_USED_TOKENS = 8_000
MAX_MESSAGE_CHARS = 500
NOTHING_FOLLOWS = "NoExtensionBias"  # the library's word for it
# A fifth to a half of llguidance's own, with which the first mask of `(a{1000}){1000}` took 17 s, and with these 0.2 s.
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL, MAX_GRAMMAR_SIZE = 200_000, 100_000, 100_000


class GrammarError(ValueError):
    """A grammar that cannot be served: one message, for whoever asked for it."""


@final
class Grammars:
    """The grammars of one model. May be used from several threads; what is not kept takes up to seconds to compile."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        end_ids: Collection[int],
        vocab_size: int | None = None,
        *,
        max_compile_s: float = MAX_COMPILE_S,
        max_kept: int = MAX_KEPT,
    ):
        """`vocab_size`: of the model, whose logits may be of more tokens than the tokenizer has, or of fewer.

        GrammarError without an end token: an answer that is complete could not end.
        """
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self.end_ids = sorted(token_id for token_id in end_ids if token_id < self._vocab_size)
        if not self.end_ids:
            raise GrammarError("the model's folder names no end token")
        self._tokenizer = tokenizer
        self._max_compile_s = max_compile_s
        self._max_kept = max_kept
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
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
        """Whether there is nothing that `prepare` would do."""
        found = self._find(grammar)
        return found is not None and not found.is_worn

    def prepare(self, grammar: str) -> None:
        """Compiles it, unless it is there and not worn out. Raises GrammarError, for the same text always the same."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"it has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
        with self._compiling:
            if not self.has(grammar):  # another may have compiled it
                self._keep(grammar, self._compiled(grammar))

    def matcher(self, grammar: str) -> "LLMatcher":
        """A new matcher, at an answer's beginning: at once, where it was prepared before. GrammarError likewise."""
        found = self._find(grammar)
        if found is None:
            self.prepare(grammar)
            found = self._find(grammar)
        if found is None:
            raise GrammarError("too many others came between")
        if isinstance(found.found, str):
            raise GrammarError(found.found)
        return found.found.deep_copy()

    def used(self, grammar: str, num_tokens: int) -> None:
        """So many tokens were drawn by matchers of a grammar, which wears it out."""
        if (found := self._find(grammar)) is not None:
            found.num_used += num_tokens

    def drop(self, grammar: str) -> None:
        """A matcher of it failed: whoever asks for it next gets one that is compiled anew."""
        with self._lock:
            self._kept.pop(grammar, None)

    def _find(self, grammar: str) -> "_Kept | None":
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _keep(self, grammar: str, found: "_Kept") -> None:
        with self._lock:
            self._kept[grammar] = found
            self._kept.move_to_end(grammar)
            while len(self._kept) > 1 and self._are_too_many():
                self._kept.popitem(last=False)

    def _are_too_many(self) -> bool:
        return (
            len(self._kept) > self._max_kept
            or sum(map(len, self._kept)) > MAX_KEPT_CHARS
            or sum(kept.taken_s for kept in self._kept.values()) > MAX_KEPT_S
        )

    def _compiled(self, grammar: str) -> "_Kept":
        from llguidance import LLMatcher, LLParserLimits

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
            return _Kept(shortened(fault))
        if taken_s > self._max_compile_s:
            took = f"to compile it took {taken_s:.1f} s, at most {self._max_compile_s:g} may"
            return _Kept(f"it is too complex: {took}")
        return _Kept(matcher, taken_s)


@dataclass(slots=True)
class _Kept:
    """What is known of a grammar."""

    found: "LLMatcher | str"  # at the beginning of an answer; or what is wrong
    taken_s: float = 0.0  # to compile it
    num_used: int = 0  # tokens that its matchers have drawn

    @property
    def is_worn(self) -> bool:
        return self.num_used >= MAX_USED_TOKENS


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
    # what a gateway has compiled is not refused by a worker whose processor is slower
    return Grammars(tokenizer, defaults.stop_token_ids, vocab_size, max_compile_s=4 * MAX_COMPILE_S)


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
        self.special_token_ids = sorted(each for each in tokenizer.special_tokens.values() if each < vocab_size)
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
