"""A conversation in the terminal with a running server, over its OpenAI-compatible HTTP API.

Deliberately a client like any other: it knows the URL and nothing of the server's insides. Conversations are not saved,
and lines are edited as readline does.
"""

import json
import readline  # noqa: F401 (it lends input() its line editing)
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TextIO

import httpx

from moonshard.serving.config.keys import ConfigError

Message = dict[str, str]
TIMEOUT = httpx.Timeout(5.0, read=None)  # a queued request may be silent for long; connecting may not


class ServerError(Exception):
    """What the server answered instead of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """None: the server's default."""

    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None


def run_chat(
    url: str,
    options: ChatOptions,
    *,
    api_key: str | None = None,
    source: TextIO = sys.stdin,
    sink: TextIO = sys.stdout,
) -> int:
    """Talk until /exit or the end of input. ConfigError where no server answers at `url`."""
    with httpx.Client(base_url=root_of(url), headers=authorization(api_key), timeout=TIMEOUT, trust_env=False) as http:
        model = options.model or first_model(http)
        sink.write(f"{model} at {url}. /exit or Ctrl-D leaves, Ctrl-C stops an answer.\n")
        history: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        while (text := _ask(source, sink)) is not None:
            if text.strip():
                history = _turn(http, request_body(model, options), [*history, user(text)], sink)
    sink.write("\n")
    return 0


def root_of(url: str) -> str:
    """The server's root, of it or of the ready line's URL, which is what OpenAI's clients take; http unless it says."""
    root = url.strip().rstrip("/").removesuffix("/v1")
    return root if "://" in root else f"http://{root}"


def authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def first_model(http: httpx.Client) -> str:
    """The first model that the server lists. ConfigError as of `served_models`."""
    return served_models(http)[0]


def served_models(http: httpx.Client) -> list[str]:
    """The models that the server lists, at least one. ConfigError if nothing answers, or what is no such server."""
    try:
        first, *others = (each["id"] for each in http.get("/v1/models").raise_for_status().json()["data"])
        return [first, *others]
    except httpx.TransportError as error:
        message = f"--url {http.base_url}: no server answers ({error}); start one with `moonshard serve`"
        raise ConfigError([message]) from error
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ConfigError([f"--api-key: {http.base_url} {_refusal(http)}"]) from error
        raise ConfigError([f"--url {http.base_url}: this is no OpenAI-compatible server ({error})"]) from error
    except (httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigError([f"--url {http.base_url}: this is no OpenAI-compatible server ({error})"]) from error


def _refusal(http: httpx.Client) -> str:
    return "does not know this key" if "authorization" in http.headers else "asks for a key"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def request_body(model: str, options: ChatOptions) -> dict[str, object]:
    chosen = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    return {"model": model, "stream": True} | {name: value for name, value in chosen.items() if value is not None}


def stream_chat(http: httpx.Client, body: Mapping[str, object]) -> Generator[dict]:
    """The chunks of one streamed chat completion. ServerError for whatever the server refuses, also midway."""
    try:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise ServerError(error_text(response.read(), response.status_code))
            for line in response.iter_lines():
                if (chunk := chunk_of(line)) is not None:
                    yield chunk
    except httpx.TransportError as error:
        raise ServerError(f"the connection to the server broke: {error}") from error


def chunk_of(line: str) -> dict | None:
    """The chunk that a line of the stream is. ServerError for an error in its place."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":  # comments and blank lines keep the connection alive
        return None
    chunk = json.loads(data)
    if "error" in chunk:
        raise ServerError(chunk["error"]["message"])
    return chunk


def chunk_text(chunk: Mapping) -> str:
    """What a chunk adds to the answer; chunks of role, usage or held-back text add nothing."""
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def error_text(body: bytes, status: int) -> str:
    """Of a refusal: what it says, or its status where it says nothing that can be read."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}"


def _ask(source: TextIO, sink: TextIO) -> str | None:
    """One line from the user, None to leave. Ctrl-C at the prompt discards the line."""
    while True:
        try:
            text = _read_line(source, sink)
        except KeyboardInterrupt:
            sink.write("\n")
            continue
        except EOFError:
            return None
        return None if text.strip() == "/exit" else text


def _read_line(source: TextIO, sink: TextIO) -> str:
    if source is sys.stdin and source.isatty():
        return input("> ")
    sink.write("> ")
    sink.flush()
    if not (line := source.readline()):
        raise EOFError
    return line.rstrip("\n")


def _turn(http: httpx.Client, body: dict[str, object], history: list[Message], sink: TextIO) -> list[Message]:
    """Stream one answer; returns the history after it. A refused question is forgotten, a stopped answer kept."""
    answer = ""
    chunks = stream_chat(http, body | {"messages": history})
    try:
        for chunk in chunks:
            text = chunk_text(chunk)
            answer += text
            sink.write(text)
            sink.flush()
    except KeyboardInterrupt:
        chunks.close()  # closes the connection, which cancels the request
    except ServerError as error:
        sink.write(f"error: {error}")
    sink.write("\n")
    return [*history, {"role": "assistant", "content": answer}] if answer else history[:-1]
