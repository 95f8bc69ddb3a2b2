"""What clients ask of a deployment while things fail, what each of them heard, and whether that is right.

Every request asks for an exact number of tokens with their logprobs, streamed over gRPC or HTTP, and either gets all of
the reference's, each once, or ends with one typed error.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import httpx
import numpy as np

from moonshard.rpc.status import RequestError
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import LOGIT_TOLERANCE, ROUTER_NEAR_TIE, assert_drawn_from, reference
from tests.cluster.conftest import Cluster
from tests.cluster.faults import Fleet
from tests.engine_room import long_text

LOGPROB_TOLERANCE = 10 * LOGIT_TOLERANCE
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    over: Literal["grpc", "http"] = "grpc"

    def options(self) -> dict[str, object]:
        sampling = {"temperature": self.sampling.temperature, "top_p": 1.0, "seed": self.sampling.seed}
        return {**sampling, "max_tokens": self.max_tokens, "ignore_eos": True, "logprobs": 0}


@dataclass
class Heard:
    """What one client heard until its stream ended."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)  # of each token, on this process's clock
    failure: str = ""  # the error's name as the client was told it
    retry_after_s: float | None = None
    ended_s: float = 0.0
    num_retries: int = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.arrivals_s += [time.monotonic()] * len(tokens)

    @property
    def longest_gap_s(self) -> float:
        return max(np.diff(self.arrivals_s), default=0.0)


def draw(rng: random.Random, number: int) -> Ask:
    """A random request of any kind: short or long, greedy or sampled, over either front."""
    return Ask(
        prompt=long_text(
            rng.choice([15, 17, 64, *(rng.randint(1, 1200) for _ in range(3))]), seed=rng.randrange(1 << 30)
        ),
        max_tokens=rng.randint(1, 120),
        sampling=Sampling(temperature=rng.choice([0.0, 0.8]), seed=rng.getrandbits(62)),
        over="http" if number % 2 else "grpc",
    )


class Listeners:
    """Clients, a thread each, who ask one request after another. Tells how many tokens all have heard so far."""

    def __init__(self, fleet: Fleet | Cluster, asked: Sequence[Ask], num_clients: int | None = None):
        """As many clients as requests, unless told otherwise."""
        self.asked = tuple(asked)
        self.heard = [Heard() for _ in asked]
        self._fleet = fleet
        self._threads = ThreadPoolExecutor(num_clients or len(asked))
        self._ends: list[Future[None]] = [
            self._threads.submit(listen, fleet, ask, heard) for ask, heard in zip(asked, self.heard, strict=True)
        ]

    @property
    def num_tokens(self) -> int:
        return sum(len(heard.tokens) for heard in self.heard)

    @property
    def are_done(self) -> bool:
        return all(end.done() for end in self._ends)

    def wait(self, timeout_s: float = 120.0) -> list[Heard]:
        deadline_s = time.monotonic() + timeout_s
        try:
            for end in self._ends:
                end.result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            raise AssertionError(f"a request hangs\n{self._fleet.logs()}") from None
        self._threads.shutdown()
        return self.heard


def listen(fleet: Fleet | Cluster, ask: Ask, heard: Heard) -> None:
    listeners: dict[str, Callable[[Fleet | Cluster, Ask, Heard], None]] = {"grpc": _listen_grpc, "http": _listen_http}
    try:
        listeners[ask.over](fleet, ask, heard)
    except httpx.TransportError as error:  # the gateway itself is gone
        heard.failure = repr(error)
    heard.ended_s = time.monotonic()


def answer(fleet: Fleet | Cluster, ask: Ask) -> Heard:
    heard = Heard()
    listen(fleet, ask, heard)
    return heard


def _listen_grpc(fleet: Fleet | Cluster, ask: Ask, heard: Heard) -> None:
    options: dict = ask.options()
    with fleet.client() as client, client.stream(ask.prompt, **options) as stream:
        try:
            for delta in stream:
                heard.take(delta.token_ids, [position.chosen.logprob for position in delta.logprobs])
        except RequestError as error:
            heard.failure, heard.retry_after_s = error.openai_code, error.retry_after_s
            return
        assert stream.summary is not None
        heard.num_retries = stream.summary.timing.num_retries


def _listen_http(fleet: Fleet | Cluster, ask: Ask, heard: Heard) -> None:
    body = {"prompt": ask.prompt, "return_token_ids": True, "stream": True, **ask.options()}
    with fleet.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            heard.failure = json.loads(response.read())["error"]["code"]
            heard.retry_after_s = float(response.headers.get("retry-after", "nan"))
            return
        events = [line[6:] for line in _lines(response, heard)]
    assert heard.failure or events[-1:] == ["[DONE]"], f"an HTTP stream broke off after {len(heard.tokens)} tokens"


def _lines(response, heard: Heard):
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        yield line
        if line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event:
            heard.failure = event["error"]["code"]
            continue
        for choice in event["choices"]:
            heard.take(choice["token_ids"], (choice["logprobs"] or {}).get("token_logprobs", []))


# ---- whether it is right


def assert_right(ask: Ask, heard: Heard) -> bool:
    """All tokens and logprobs are the reference's. Returns whether a near tie cut the comparison short."""
    assert not heard.failure, f"{heard.failure} after {len(heard.tokens)} of {ask.max_tokens} tokens"
    assert len(heard.tokens) == ask.max_tokens
    return assert_right_so_far(ask, heard)


def assert_right_so_far(ask: Ask, heard: Heard) -> bool:
    """The same for a stream that was cut off and ended with a typed error."""
    if not heard.tokens:
        return False
    if assert_drawn_from(reference(), ask.prompt, heard.tokens, ask.sampling):
        return True
    assert len(heard.logprobs) == len(heard.tokens)
    return _differs_after_a_router_near_tie(ask, heard)


def _differs_after_a_router_near_tie(ask: Ask, heard: Heard) -> bool:
    """Whether logprobs are another expert's, as tokens may be (`assert_drawn_from`). Fails where they are nobody's."""
    logits, margin = reference().observe([*ask.prompt, *heard.tokens])
    logits = logits[len(ask.prompt) - 1 : -1].astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    off = np.abs(heard.logprobs - expected[np.arange(len(heard.tokens)), heard.tokens])
    if (off < LOGPROB_TOLERANCE).all():
        return False
    first = int((off >= LOGPROB_TOLERANCE).argmax())
    least = margin[: len(ask.prompt) + first].min()
    assert least < ROUTER_NEAR_TIE, f"logprob {first} is off by {off[first]:.4f}, least router margin {least:.1e}"
    return True


def assert_all_right(asked: Sequence[Ask], heard: Sequence[Heard]) -> None:
    cut_short = sum(assert_right(*each) for each in zip(asked, heard, strict=True))
    assert cut_short <= 1 + len(asked) // 20
