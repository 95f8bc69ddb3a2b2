"""Prompt lookup: what followed the last time these tokens stood in the prompt or the answer.

Agents copy what they read: identifiers, code, the arguments of the call before. Sources: prompt lookup decoding (A.
Saxena, 2023); LLMA (arXiv:2304.04487).
"""

from collections.abc import Sequence

import numpy as np

LONGEST, SHORTEST = 4, 2  # tokens that must have stood there before; longer ones are tried first


class Lookup:
    """The tokens of one sequence, in one growing array that is searched whole: 40 to 80 us at 100,000 tokens."""

    def __init__(self, prompt: Sequence[int]):
        self._num_prompt = len(prompt)
        self._num_tokens = len(prompt)
        self._tokens = np.zeros(max(64, 2 * len(prompt)), np.int32)
        self._tokens[: len(prompt)] = prompt

    def propose(self, generated: Sequence[int], guessed: Sequence[int], most: int) -> tuple[int, ...]:
        """At most so many tokens behind `generated` and then `guessed`; none where nothing of the kind stood before."""
        self._take(generated)
        known = self._tokens[: self._num_tokens]
        tokens = np.concatenate([known, np.asarray(guessed, np.int32)]) if guessed else known
        begin = _end_of_match(tokens)
        if begin is None:
            return ()
        repeated = tokens[begin:]  # what repeats itself goes on to: a guess may be longer than that
        return tuple(np.resize(repeated, most).tolist())

    def _take(self, generated: Sequence[int]) -> None:
        end = self._num_prompt + len(generated)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(end, np.int32)])
        self._tokens[self._num_tokens : end] = generated[self._num_tokens - self._num_prompt :]
        self._num_tokens = end


def _end_of_match(tokens: np.ndarray) -> int | None:
    """Behind the last earlier place where as many of the last tokens stood as possible, `SHORTEST` at least."""
    places = np.flatnonzero(tokens[:-1] == tokens[-1])  # where the last token stood
    found = None
    for length in range(2, LONGEST + 1):
        places = places[places >= length - 1]
        if len(tokens) < length or not len(places := places[tokens[places - length + 1] == tokens[-length]]):
            break
        found = int(places[-1]) + 1 if length >= SHORTEST else None
    return found
