"""Servers beside each other: the same prompts in turns, and what becomes of samples disturbed and servers lost."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from moonshard.experiments.bench.peers import compare as comparing
from moonshard.experiments.bench.peers.compare import Comparison, Contender, Effort, compare, prompt_ids
from moonshard.experiments.bench.peers.completions import (
    Answer,
    Peer,
    PeerError,
    RowRefused,
    ask,
    connect,
    parse_peers,
)
from moonshard.experiments.bench.peers.rows import Cached, ClosedLoop, Decoding, Prefilling, Row
from moonshard.experiments.bench.peers.watch import Window
from moonshard.models import model as models
from moonshard.models.tokenizers.tokenizer import load_tokenizer
from tests.experiments.bench.peers.fake_openai import Script, answering

FOLDER = Path(models.__file__).parent / "pocket"
QUIET = Window(elapsed_s=1.0, foreign_s=0.0)
NOISY = Window(elapsed_s=1.0, foreign_s=0.5)
PREFILL = Prefilling(prompt_tokens=12)
DECODE = Decoding(batch=2, prompt_tokens=5, completion_tokens=3)
NUM_PROBES = 1  # before the first row


@contextmanager
def windows(*given: Window) -> Iterator[None]:
    """What the watch says of each run in turn, warm-up first; at the end quiet for ever. All are idle at once."""
    left = iter(given)

    async def idle() -> None: ...

    @contextmanager
    def watched(roots: Sequence[int]) -> Iterator[Window]:
        yield next(left, QUIET)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "watched", watched)
        patch.setattr(comparing, "settled", idle)
        yield


def measure(scripts: Sequence[Script], rows: Sequence[Row], *, samples: int = 2, tries: int = 3) -> Comparison:
    with ExitStack() as stack:
        urls = [stack.enter_context(answering(script)) for script in scripts]
        contenders = [
            Contender(peer=Peer(name=script.name, url=url)) for script, url in zip(scripts, urls, strict=True)
        ]
        effort = Effort(samples=samples, tries=tries)
        return asyncio.run(compare(contenders, rows, FOLDER, effort, lambda text: None, seed=0))


@pytest.mark.parametrize("text", ["", "llama", "=http://localhost:1", "a=localhost:8080", "a=ftp://x", "a=http://h:x"])
def test_what_is_no_name_and_url_is_quoted(text: str):
    with pytest.raises(PeerError, match=f"--peer {text}: "):
        parse_peers([text])


def test_a_name_stands_for_one_server():
    with pytest.raises(PeerError, match="figures of ours already"):
        parse_peers(["ours=http://h"], taken=("ours",))
    with pytest.raises(PeerError, match="figures of a already"):
        parse_peers(["a=http://h", "a=http://i"])


def test_a_url_may_end_as_clients_write_it():
    found = parse_peers([f"{index}=http://h:1{suffix}" for index, suffix in enumerate(("", "/", "/v1", "/v1/"))])
    assert {peer.url for peer in found} == {"http://h:1"}


def test_every_server_gets_the_same_prompts_in_turns():
    log: list[tuple[str, list[int]]] = []
    with windows():
        measure([Script(name="a", log=log), Script(name="b", log=log)], [PREFILL], samples=3)
    asked = log[2 * NUM_PROBES :]
    assert [name for name, _ in asked] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    of_a, of_b = ([prompt for name, prompt in asked if name == wanted] for wanted in "ab")
    assert of_a == of_b
    assert len({tuple(prompt) for prompt in of_a}) == 4
    assert {len(prompt) for prompt in of_a} == {12}


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_each_begins_and_nobody_always_follows_the_same_server(names):
    log: list[tuple[str, list[int]]] = []
    num_samples = 2 * len(names)
    with windows():
        measure([Script(name=name, log=log) for name in names], [PREFILL], samples=num_samples)
    asked = [name for name, _ in log[len(names) * (NUM_PROBES + 1) :]]  # without the warm-up
    samples = [asked[first : first + len(names)] for first in range(0, len(asked), len(names))]
    assert len(samples) == num_samples
    assert all(sorted(sample) == list(names) for sample in samples)
    assert {sample[0] for sample in samples} == set(names)
    before = {name: {one for one, other in pairwise(asked) if other == name} - {name} for name in names}
    assert all(len(found) > 1 for found in before.values()) or len(names) == 2


def test_each_kind_of_row_asks_what_its_name_says():
    script = Script()
    rows = (
        DECODE,
        Cached(prompt_tokens=7, repeats=2),
        ClosedLoop(num_requests=6, num_clients=2, prompt_tokens=4, completion_tokens=3),
    )
    with windows():
        found = measure([script], rows, samples=1)
    lengths = [len(prompt) for _, prompt in script.log[NUM_PROBES:]]
    assert lengths == [5] * 2 * 2 + [7] * 3 * 2 + [4] * (2 + 6)  # warm-up and one sample of each
    repeated = script.log[NUM_PROBES + 4 : NUM_PROBES + 7]
    assert len({tuple(prompt) for _, prompt in repeated}) == 1
    assert {name: len(figure.values) for (name, _), figure in found.figures.items()} == {
        "ITL, batch 2": 2,
        "TTFT, 7 tokens cached": 2,
        "output tokens, 6 requests of 4 + 3 at 2": 1,
    }


def test_prompts_have_no_token_that_only_a_template_writes():
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer is not None
    assert not set(prompt_ids(FOLDER)) & set(tokenizer.special_tokens.values())


def test_a_server_without_token_ids_gets_their_text():
    script = Script(takes_ids=False)
    with windows():
        found = measure([script], [PREFILL])
    assert all(isinstance(prompt, str) and prompt for _, prompt in script.log)
    assert found.notes == ["fake: takes no token ids, so it was sent their text"]


def test_the_tokens_of_an_answer_are_those_that_its_usage_counts():
    answer = Answer(sent_ns=0, arrivals_ns=(2_000_000, 10_000_000), num_tokens=5)
    assert (answer.ttft_ms, answer.itl_ms) == (2.0, 2.0)
    with pytest.raises(RowRefused, match="after one token"):
        _ = Answer(sent_ns=0, arrivals_ns=(1,), num_tokens=1).itl_ms


def test_a_chunk_without_text_is_no_arrival():
    async def count() -> int:
        with answering(Script()) as url:
            async with httpx.AsyncClient(base_url=url) as http:
                connection = await connect(Peer(name="a", url=url), http, None)
                return len((await ask(connection, [1], 3)).arrivals_ns)

    assert asyncio.run(count()) == 3


def test_no_request_goes_by_a_connection_that_the_server_may_be_closing():
    script = Script()
    with windows():
        measure([script], [DECODE, PREFILL])
    assert len(script.connections) == len(set(script.connections)) > 4


def test_another_seed_gives_other_prompts():
    seen = []
    for seed in (0, 1):
        script = Script()
        with windows(), answering(script) as url:
            contender = Contender(peer=Peer(name="a", url=url))
            effort = Effort(samples=1, tries=1)
            asyncio.run(compare([contender], [PREFILL], FOLDER, effort, lambda text: None, seed=seed))
        seen.append({json.dumps(prompt) for _, prompt in script.log[NUM_PROBES:]})
    assert not seen[0] & seen[1]


def test_a_disturbed_sample_is_taken_again_with_another_prompt():
    script = Script()
    with windows(QUIET, NOISY, NOISY, QUIET, QUIET):
        found = measure([script], [PREFILL], samples=2)
    (figure,) = found.figures.values()
    assert (len(figure.values), figure.num_repeated, figure.num_disturbed) == (2, 2, 0)
    assert len({json.dumps(prompt) for _, prompt in script.log[NUM_PROBES:]}) == 1 + 3 + 1


def test_a_sample_that_stays_disturbed_is_kept_and_counted():
    with windows(QUIET, NOISY, NOISY, NOISY, QUIET):
        found = measure([Script()], [PREFILL], samples=2, tries=3)
    (figure,) = found.figures.values()
    assert (len(figure.values), figure.num_repeated, figure.num_disturbed) == (2, 2, 1)


def test_a_peer_that_dies_in_the_middle_keeps_what_it_finished_and_the_rest_goes_on():
    mortal, other = Script(name="mortal", answers=NUM_PROBES + 3 + 1), Script(name="other")
    with windows():
        found = measure([mortal, other], [PREFILL, DECODE, Cached(prompt_tokens=3, repeats=1)])
    of_mortal = [name for name, server in found.figures if server == "mortal"]
    assert of_mortal == [PREFILL.name]
    assert len([server for _, server in found.figures if server == "other"]) == 3
    (note,) = found.notes
    assert note.startswith(f"mortal: was lost in the row of {DECODE.name}, ")


def test_a_peer_that_does_not_answer_has_empty_rows_and_a_name():
    with answering(Script()) as url:
        gone = Contender(peer=Peer(name="gone", url="http://127.0.0.1:9"))
        there = Contender(peer=Peer(name="there", url=url))
        with windows():
            effort = Effort(samples=1, tries=1)
            found = asyncio.run(compare([gone, there], [PREFILL], FOLDER, effort, lambda text: None, seed=0))
    assert list(found.figures) == [(PREFILL.name, "there")]
    assert found.servers == ("gone", "there")
    assert found.notes[0].startswith("gone: nothing was measured, http://127.0.0.1:9 does not answer: ConnectError")


def test_what_a_peer_refuses_is_one_empty_cell():
    script = Script(refuses=lambda body: len(body["prompt"]) == 12)
    with windows():
        found = measure([script], [PREFILL, DECODE])
    assert [name for name, _ in found.figures] == [DECODE.name]
    assert found.notes == [f"fake: no {PREFILL.name}, 400: not like this"]
