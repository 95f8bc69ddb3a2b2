"""Streamed requests to anybody's `/v1/completions`: the same token ids to every server, a stamp for what comes back.

A server that refuses token ids gets the text of the checkpoint's own tokenizer instead; its prompts may then be a few
tokens longer or shorter. How many tokens an answer has is what the server's usage says, since a chunk of the stream may
hold several or, where bytes of a character are still missing, none.
Source: the OpenAI API's completions; `ignore_eos` and usage in a stream as vLLM and llama.cpp have them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from moonshard.models.tokenizers.tokenizer import Tokenizer

TIMEOUT = httpx.Timeout(300.0, connect=10.0)  # 2,048 tokens at a few per second take minutes
FRESH = httpx.Limits(max_keepalive_connections=0)  # some servers close idle connections just when one is used again
PROBE = (17, 18, 19)  # token ids, to see whether the server takes ids


class PeerError(ValueError):
    """What was said of a peer on the command line is wrong; the message quotes it."""


class PeerLost(Exception):
    """A server does not answer, or no longer; the message says how it was noticed."""


class RowRefused(Exception):
    """A server answers, but not what was asked; the message is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A server by the name under which its figures stand."""

    name: str
    url: str  # without a path


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A server that has answered."""

    http: httpx.AsyncClient
    model: str
    tokenizer: Tokenizer | None  # None: it takes token ids


def client_of(peer: Peer) -> httpx.AsyncClient:
    """A client with a fresh connection for each request, for every server alike."""
    return httpx.AsyncClient(base_url=peer.url, timeout=TIMEOUT, limits=FRESH, trust_env=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One request as its client saw it."""

    sent_ns: int
    arrivals_ns: tuple[int, ...]  # of each chunk with text
    num_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals_ns[0] - self.sent_ns) / 1e6

    @property
    def itl_ms(self) -> float:
        """The mean time of a token after the first. RowRefused where there is none."""
        if self.num_tokens < 2:
            raise RowRefused("the answer ended after one token")
        return (self.arrivals_ns[-1] - self.arrivals_ns[0]) / (self.num_tokens - 1) / 1e6


def parse_peers(texts: Sequence[str], taken: Sequence[str] = ()) -> tuple[Peer, ...]:
    """Peers from `NAME=URL`. PeerError for one that is not that, or whose name is there already."""
    names, found = set(taken), []
    for text in texts:
        name, _, url = text.partition("=")
        name, url = name.strip(), url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        if not name or not _is_http(url):
            raise PeerError(f"--peer {text}: expected NAME=URL, as in llama=http://127.0.0.1:8080")
        if name in names:
            raise PeerError(f"--peer {text}: there are figures of {name} already")
        names.add(name)
        found.append(Peer(name=name, url=url))
    return tuple(found)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


async def connect(peer: Peer, http: httpx.AsyncClient, tokenizer: Tokenizer | None) -> Connection:
    """Asks for the model, and whether token ids are taken. PeerLost where neither works."""
    try:
        listed = (await http.get("/v1/models")).raise_for_status().json()
        model = str(listed["data"][0]["id"])
        with_ids = Connection(http=http, model=model, tokenizer=None)
        if (refused := await _refusal(with_ids)) is None:
            return with_ids
        with_text = Connection(http=http, model=model, tokenizer=tokenizer)
        if tokenizer is None or await _refusal(with_text) is not None:
            raise PeerLost(f"{peer.url} refuses a prompt: {refused}")
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise PeerLost(f"{peer.url} does not answer: {_say(error)}") from error
    return with_text


async def _refusal(connection: Connection) -> str | None:
    try:
        await ask(connection, PROBE, 2)
    except RowRefused as error:
        return str(error)
    return None


async def ask(connection: Connection, prompt: Sequence[int], max_tokens: int) -> Answer:
    """One streamed request, greedy, to its full length. PeerLost, or RowRefused with the server's own words."""
    text = connection.tokenizer
    body = {
        "model": connection.model,
        "prompt": list(prompt) if text is None else text.decode(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        return await _stream(connection.http, body)
    except httpx.HTTPStatusError as error:
        raise RowRefused(f"{error.response.status_code}: {error.response.text.strip()[:200]}") from error
    except httpx.HTTPError as error:
        raise PeerLost(_say(error)) from error


async def _stream(http: httpx.AsyncClient, body: dict[str, object]) -> Answer:
    with_text: list[int] = []
    any_chunk: list[int] = []
    counted: int | None = None
    sent_ns = time.perf_counter_ns()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            arrived_ns = time.perf_counter_ns()
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("error"):
                raise RowRefused(str(chunk["error"])[:200])
            if chunk.get("choices"):
                any_chunk.append(arrived_ns)
                if chunk["choices"][0].get("text"):
                    with_text.append(arrived_ns)
            if chunk.get("usage"):
                counted = chunk["usage"].get("completion_tokens")
    arrivals_ns = with_text or any_chunk
    if not arrivals_ns:
        raise RowRefused("the answer has no token")
    num_tokens = len(arrivals_ns) if counted is None else counted
    return Answer(sent_ns=sent_ns, arrivals_ns=tuple(arrivals_ns), num_tokens=num_tokens)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"
