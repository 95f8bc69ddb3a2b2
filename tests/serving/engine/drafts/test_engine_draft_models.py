"""A draft model beside the target: it guesses what it would over the whole sequence anew, and changes no token."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonshard.models.registry import open_draft, open_model
from moonshard.serving.control.drafting.guesses import Guesses
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.compiled.prepared import MIN_ASKED
from moonshard.serving.engine.loading.draft import OpenDraft
from moonshard.serving.engine.steps import GUESS_AFTER, ProgramKey, StepKind
from moonshard.sharding.rules import DECODE
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE, Shard
from tests.agreement import FIXTURES, NEAR_TIE, assert_drawn_from, reference
from tests.engine_room import long_text, request, serve, uncompiled_programs
from tests.models.drafts import Drafting, loaded_draft, shifted, target_features, with_mtp, with_taps

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
NUM_AHEAD = 3
SHAPE = (1, 152)  # of the rows of a fresh pass, which is compiled once
EAGLE, MTP = "eagle3", "mtp"
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=3, frequency_penalty=0.2)


class Recorded(Guesses):
    """Keeps all that the draft model said, by how many tokens it stood behind."""

    def __init__(self, keep: Callable[[int, tuple[int, ...]], None]):
        super().__init__(None, None, NUM_AHEAD)
        self._keep = keep

    def take_guesses(self, num_generated: int, guesses: tuple[int, ...]) -> None:
        super().take_guesses(num_generated, guesses)
        self._keep(num_generated, guesses)


class Record:
    """`Drafters` whose guesses are kept by request and choice."""

    def __init__(self):
        self.said: dict[tuple[bytes, int], dict[int, tuple[int, ...]]] = {}

    def __call__(self, request: Request, choice: int) -> Recorded:
        return Recorded(self.said.setdefault((request.id, choice), {}).__setitem__)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind's tensors: the taps of the fixture's draft are said, the target has a layer more."""
    under = tmp_path_factory.mktemp("drafts")
    return {EAGLE: with_taps(under / EAGLE, [0, 1, 2]), MTP: with_mtp(under / MTP)}


@functools.cache
def _drafted(kind: str, folder: Path) -> tuple[OpenDraft, Callable[[], Drafting]]:
    """A draft for the engine, and the same as the tests of models run it, one sequence at a time."""
    own, target = (folder, FIXTURES / "kimi_k2") if kind == EAGLE else (None, folder)
    checkpoint, model = open_model(target)
    tensors, draft = open_draft(own, model, checkpoint)
    (group,) = model.kv_groups("float32")
    opened = OpenDraft(model=draft, tensors=tensors, target=group, dtype="float32", fingerprint="")
    return opened, lambda: loaded_draft(own, target)


def requests() -> list[Request]:
    """Prompts of less and more than a chunk, greedy and sampled, one of several choices."""
    return [
        request(long_text(5, 1), 20, sampling=GREEDY),
        request(long_text(61, 2), 20, sampling=SAMPLED),
        request(long_text(130, 3), 20, sampling=GREEDY),
        request(long_text(33, 4), 12, sampling=replace(SAMPLED, seed=8), n=2),
    ]


def assert_guessed_by(drafting: Drafting, tokens: Sequence[int], features: np.ndarray, guesses: Sequence[int]) -> int:
    """That the guesses are those of a chain behind all these tokens, each one's features the target's own.

    The first guess that all but ties with another ends the comparison. Returns how many were compared.
    """
    known = tokens[:-1]
    hidden = drafting.extend(shifted(known, tokens[-1]), features[: len(known)], shape=SHAPE)[-1]
    expected = drafting.chain(hidden, len(known) - 1, NUM_AHEAD).tolist()
    for place, (expects, guess) in enumerate(zip(expected, guesses, strict=False)):
        best, second = np.sort(drafting.logits(hidden)[0])[[-1, -2]]
        if best - second < NEAR_TIE:
            return place
        assert guess == expects, f"guess {place} behind {len(tokens)} tokens"
        hidden = drafting.step(guess, hidden, len(known) + place)
    return len(guesses)


@pytest.mark.parametrize("kind", [EAGLE, MTP])
def test_a_draft_model_guesses_what_it_would_over_the_whole_sequence(kind, folders):
    asked, record = requests(), Record()
    draft, fresh = _drafted(kind, folders[kind])
    run = serve(asked, drafters=record, q_len=1 + NUM_AHEAD, draft=draft)
    assert len(record.said) == sum(each.n for each in asked)
    num_compared = 0
    for each in asked[:3]:
        said, generated = record.said[each.id, 0], run.of(each)
        assert min(said) == 1  # a prefill guesses too; it may have no block for what comes behind the first guess
        said[1] = said[1][:1]
        features = target_features((*each.prompt, *generated), draft.model.taps)
        for num_generated in [*list(said)[:4], *list(said)[-4:]]:
            known = [*each.prompt, *generated[:num_generated]]
            tried = said[num_generated][: max(0, each.max_tokens - num_generated - 1)]  # blocks are taken for no others
            num_compared += assert_guessed_by(fresh(), known, features, tried)
    assert num_compared > 30


@pytest.mark.parametrize("kind", [EAGLE, MTP])
@pytest.mark.parametrize(
    "shard",
    [
        pytest.param(ALONE, marks=pytest.mark.slow),
        pytest.param(Shard(mesh=MeshShape(tensor=2), rules=DECODE), marks=pytest.mark.slow),
        Shard(mesh=MeshShape(data=2, tensor=2), rules=DECODE),
    ],
    ids=["one device", "tensor 2", "data 2, tensor 2"],
)
def test_no_token_depends_on_a_draft_model(kind, shard, folders):
    asked = requests()
    run = serve(asked, drafters=Record(), q_len=1 + NUM_AHEAD, draft=_drafted(kind, folders[kind])[0], shard=shard)
    assert run.num_guessed > 0
    for each in asked:
        for choice in range(each.n):
            assert len(run.of(each, choice)) == each.max_tokens
            assert_drawn_from(reference(), each.prompt, run.of(each, choice), each.sampling, choice)


@pytest.mark.parametrize("kind", [StepKind.PREFILL, StepKind.DECODE])
def test_a_small_step_is_made_once_its_guesses_are_there_and_both_are_asked_for(kind, folders):
    draft = _drafted(EAGLE, folders[EAGLE])[0]
    own = uncompiled_programs(draft=draft, q_len=1 + NUM_AHEAD, has_buckets=True).prepared
    own.only_needed()
    asked = list[ProgramKey]()
    own.tell_missing(asked.append)
    smallest, *_, largest = own.shapes.buckets[kind]
    for _ in range(MIN_ASKED):
        assert own.bucket_for(kind, 1) == largest
    assert asked == [(kind, smallest), (GUESS_AFTER[kind], smallest)]
    for wanted in own.others:
        if wanted.key in asked:
            assert own.bucket_for(kind, 1) == largest
            own.take(wanted, lambda: None)
    assert own.bucket_for(kind, 1) == smallest


@pytest.mark.parametrize("accepts_first", [False, True])
def test_guesses_are_verified_once_all_is_there_that_it_takes_for_so_few_rows(accepts_first, folders):
    draft = _drafted(EAGLE, folders[EAGLE])[0]
    own = uncompiled_programs(draft=draft, q_len=1 + NUM_AHEAD, has_buckets=True).prepared
    own.only_needed()
    assert not {StepKind.VERIFY, StepKind.GUESS_VERIFY, StepKind.ACCEPT} & {wanted.key[0] for wanted in own.needed}
    asked = list[ProgramKey]()
    own.tell_missing(asked.append)
    smallest, *_, largest = own.shapes.buckets[StepKind.VERIFY]
    assert not any(own.can_verify(1) for _ in range(MIN_ASKED))
    keys = [(StepKind.VERIFY, smallest), (StepKind.GUESS_VERIFY, smallest), (StepKind.ACCEPT, 0)]
    assert asked == keys
    for key in reversed(keys) if accepts_first else keys:
        assert not own.can_verify(1)
        (wanted,) = [wanted for wanted in own.others if wanted.key == key]
        own.take(wanted, lambda: None)
    assert own.can_verify(1)
    assert own.bucket_for(StepKind.VERIFY, 1) == smallest
    assert not own.can_verify(largest)
