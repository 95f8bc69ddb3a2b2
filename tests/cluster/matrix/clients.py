"""Clients that lose no answer: who is cut off, or waits too long, asks the other gateway under the same name.

Each asks one request after another over HTTP, as long as the load runs. Of every request it is kept when which token
was heard first, so that what its client waited for can be told afterwards for any time.
"""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import httpx

from moonshard.serving.control.sampling_parameters import Sampling
from tests.cluster.streams import Ask, Heard, assert_right
from tests.engine_room import long_text

MAX_TRIES = 100
TRY_AGAIN_S = 0.1
REFUSALS = (429, 503)  # of a request of which nothing was told yet
PROMPT_TOKENS = (20, 500)
NEW_TOKENS = (60, 160)


@dataclass
class Asked:
    """One request: what its client heard last, and when of all attempts together."""

    ask: Ask
    asked_s: float
    heard: Heard = field(default_factory=Heard)
    first_heard_s: list[float] = field(default_factory=list)  # by token
    broken_s: list[float] = field(default_factory=list)  # when an attempt was given up by its client
    ended_s: float | None = None
    wrong: str = ""
    _told: list[int] = field(default_factory=list)  # the most that any attempt told

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.heard.take(tokens, logprobs)
        more = len(self.heard.tokens) - len(self.first_heard_s)
        self.first_heard_s += [time.monotonic()] * max(0, more)

    def begin_again(self) -> None:
        """The next attempt tells all tokens from the first: those that were told must come again."""
        self._told = max(self._told, self.heard.tokens, key=len)
        self.heard = Heard()

    @property
    def is_lost(self) -> bool:
        return bool(self.heard.failure) or len(self.heard.tokens) != self.ask.max_tokens

    def longest_wait_s(self, begun_s: float, over_s: float) -> float:
        """The longest time without a token that lies between these two or ends later, counted from `begun_s`."""
        times = [self.asked_s, *self.first_heard_s]
        if self.ended_s is None:
            times.append(time.monotonic())
        gaps = [(max(first, begun_s), second) for first, second in pairwise(times)]
        return max((second - first for first, second in gaps if second > begun_s and first < over_s), default=0.0)

    def is_right(self) -> bool:
        """Whether all tokens are the reference's, and all attempts told the same."""
        try:
            assert self.heard.tokens[: len(self._told)] == self._told, "told otherwise the second time"
            assert_right(self.ask, self.heard)
        except AssertionError as error:
            self.wrong = str(error)
        return not self.wrong


@dataclass
class Load:
    """`num_clients` of them; each begins with the first of `urls`, and goes to the next one where it is let down."""

    urls: Sequence[str]
    num_clients: int
    patience_s: float  # without a byte, until a client gives an attempt up
    asked: list[Asked] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, seed: int) -> Iterator["Load"]:
        """All requests have ended after the block."""
        with ThreadPoolExecutor(self.num_clients) as threads:
            clients = [threads.submit(self._go_on, 1000 * seed + number) for number in range(self.num_clients)]
            try:
                yield self
            finally:
                self._is_over.set()
                for client in clients:
                    client.result(300)

    @property
    def num_tokens(self) -> int:
        return sum(len(one.first_heard_s) for one in self.asked)

    def failures(self) -> list[str]:
        return [one.heard.failure for one in self.asked if one.heard.failure]

    def longest_wait_s(self, begun_s: float, over_s: float) -> float:
        return max((one.longest_wait_s(begun_s, over_s) for one in self.asked), default=0.0)

    def broken_s(self, since_s: float) -> float | None:
        """When the first client gave up an attempt."""
        return min((when for one in self.asked for when in one.broken_s if when > since_s), default=None)

    def _go_on(self, seed: int) -> None:
        random = Random(seed)
        turns = itertools.cycle(self.urls)
        while not self._is_over.is_set():
            sampling = Sampling(temperature=random.choice([0.0, 0.8]), seed=random.getrandbits(62))
            prompt = long_text(random.randint(*PROMPT_TOKENS), seed=random.getrandbits(30))
            ask = Ask(prompt=prompt, max_tokens=random.randint(*NEW_TOKENS), sampling=sampling)
            one = Asked(ask, time.monotonic())
            self.asked.append(one)
            self._ask(one, f"{seed}-{len(self.asked)}-{one.asked_s}", turns)
            one.ended_s = time.monotonic()

    def _ask(self, one: Asked, name: str, urls: Iterator[str]) -> None:
        for url in itertools.islice(urls, MAX_TRIES):
            one.begin_again()
            try:
                if self._attempt(one, url, {"idempotency-key": name}):
                    return
                time.sleep(TRY_AGAIN_S)  # as a client does that was told to come back
            except httpx.TransportError as error:
                one.broken_s.append(time.monotonic())
                one.heard.failure = repr(error)

    def _attempt(self, one: Asked, url: str, headers: Mapping[str, str]) -> bool:
        """False where it was refused for now. TransportError where the gateway is gone or silent."""
        timeout = httpx.Timeout(self.patience_s, connect=min(self.patience_s, 1.0))
        body = {"prompt": one.ask.prompt, "return_token_ids": True, "stream": True, **one.ask.options()}
        with (
            httpx.Client(timeout=timeout) as http,
            http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status_code != 200:
                one.heard.failure = f"{response.status_code}: {response.read().decode()[:300]}"
                return response.status_code not in REFUSALS
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._hear(one, json.loads(line[6:]))
        return True

    def _hear(self, one: Asked, event: Mapping) -> None:
        if "error" in event:
            one.heard.failure = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            one.take(choice["token_ids"], (choice["logprobs"] or {}).get("token_logprobs", []))
