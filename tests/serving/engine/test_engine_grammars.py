"""Constrained sequences draw the likeliest, or the same noise's, of what their grammar allows, and disturb nobody."""

import asyncio
import json
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.models.tokenizers.tokenizer import load_tokenizer
from moonshard.serving.constrained import masks as late_masks
from moonshard.serving.control.batching.queue import NeverFits
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.agreement import FIXTURES, allowed_by, assert_drawn_from, assert_same_tokens, reference
from tests.engine_room import Run, an_engine, grammars, long_text, programs, request, serve, until_idle
from tests.serving.engine.test_engine_meshes import ONE_OF_FEW
from tests.sizes import BLOCK_SIZE, NUM_BLOCKS

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
GREEDY, SEEDED = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=7)
LETTERS = "start: /[a-z ]{1,200}/"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: %json {json.dumps(SCHEMA)}"
END_IDS = frozenset({2017, 2018})


def constrained(grammar: str = LETTERS, max_tokens: int = 30, *, prompt: int = 20, sampling=GREEDY, **more) -> Request:
    return request(long_text(prompt), max_tokens, sampling=sampling, grammar=grammar, stop_token_ids=END_IDS, **more)


def allowed(grammar: str, tokens: list[int]) -> np.ndarray:
    """What may be drawn at each position."""
    return allowed_by(grammars().matcher(grammar), tokens, reference().config.vocab_size)


def text_of(tokens: Sequence[int]) -> bytes:
    tokenizer = load_tokenizer(FIXTURES / "kimi_k2")
    assert tokenizer is not None
    return b"".join(tokenizer.token_bytes(token) for token in tokens)


def assert_keeps_to(run: Run, asked: Request, choice: int = 0) -> None:
    tokens = run.of(asked, choice)
    may = allowed(asked.grammar, tokens) if asked.grammar else None
    assert_drawn_from(reference(), asked.prompt, tokens, asked.sampling, choice, allowed=may)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("grammar", [LETTERS, JSON], ids=["regex", "json"])
def test_each_token_is_the_one_drawn_from_what_the_grammar_allows(grammar, sampling):
    asked = constrained(grammar, 60, sampling=sampling)
    assert_keeps_to(serve([asked]), asked)


def test_an_answer_ends_where_its_grammar_does():
    asked = constrained('start: "yes" | "no"')
    run = serve([asked])
    *said, end = run.of(asked)
    assert text_of(said) in (b"yes", b"no")
    assert end in END_IDS
    assert set(run.finish.values()) == {"stop"}


def test_json_that_a_random_model_writes_is_what_the_schema_says():
    requests = [constrained(JSON, 100, prompt=10 + n, sampling=Sampling(temperature=1.5, seed=n)) for n in range(6)]
    run = serve(requests)
    for asked in requests:
        *said, _ = run.of(asked)
        found = json.loads(text_of(said))
        assert set(found) == {"city", "days"}
        assert 0 <= found["days"] <= 9
        assert len(found["city"]) <= 12


def test_those_beside_a_constrained_sequence_draw_what_they_would_without_it():
    free = [request(long_text(n), 20, sampling=SEEDED) for n in (5, 33, 70)]
    bound = [constrained(JSON, 40, sampling=SEEDED), constrained(LETTERS, 25, prompt=50)]
    together = serve([free[0], bound[0], free[1], bound[1], free[2]])
    for asked in free:
        assert_same_tokens(reference(), asked.prompt, serve([asked]).of(asked), together.of(asked), SEEDED)
    for asked in bound:
        assert_keeps_to(together, asked)


def test_preempted_sequences_go_on_in_their_grammar():
    requests = [constrained(LETTERS, 90, prompt=60 + n, sampling=Sampling(temperature=1.0, seed=n)) for n in range(6)]
    roomy, tight = serve(requests), serve(requests, num_blocks=14)
    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert tight.tokens == roomy.tokens


@pytest.mark.parametrize(("mesh", "rules"), ONE_OF_FEW, ids=lambda each: str(each).split("(")[0])
def test_over_a_mesh_each_row_of_each_partition_has_its_own_mask(mesh: MeshShape, rules: Rules):
    grammars_of = (LETTERS, "", JSON)
    requests = [
        constrained(grammars_of[n % 3], 25, prompt=10 + 7 * n, sampling=Sampling(temperature=n % 2, seed=n))
        for n in range(9)
    ]
    run = serve(requests, shard=Shard(mesh=mesh, rules=rules))
    for asked in requests:
        assert_keeps_to(run, asked)


def test_every_choice_is_in_a_place_of_its_own():
    asked = constrained(JSON, 60, sampling=Sampling(temperature=1.0, seed=3), n=4)
    run = serve([asked])
    assert len({tuple(tokens) for tokens in run.tokens.values()}) > 1
    for choice in range(4):
        assert_keeps_to(run, asked, choice)


@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_what_goes_on_elsewhere_draws_the_tokens_it_would_have_drawn(num_tokens):
    asked = constrained(LETTERS, 40, sampling=SEEDED)
    whole = serve([asked]).of(asked)

    async def go_on() -> list[int]:
        pool, found = BlockPool(1, NUM_BLOCKS, BLOCK_SIZE), Run()
        engine = an_engine(programs(), pool, found.take)
        engine.start()
        engine.submit(asked, {0: tuple(whole[:num_tokens])})
        await until_idle(engine)
        await engine.close()
        engine.failed.cancel()
        return found.of(asked)

    rest = asyncio.run(go_on())
    assert_same_tokens(reference(), asked.prompt, whole, [*whole[:num_tokens], *rest], SEEDED)


def test_a_stop_is_let_through_where_the_grammar_allows_nothing_else():
    asked = constrained('start: "yes"', min_tokens=20)
    tokens = serve([asked]).of(asked)
    first_end = next(index for index, token in enumerate(tokens) if token in END_IDS)
    assert text_of(tokens[:first_end]) == b"yes"
    assert set(tokens[first_end:]) <= END_IDS, "behind its end an answer that may not end yet says nothing else"


def test_a_grammar_that_does_not_compile_is_turned_down_by_name_and_nothing_is_kept():
    async def submit() -> None:
        pool = BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)
        engine = an_engine(programs(), pool, Run().take)
        engine.start()
        with pytest.raises(NeverFits, match="foo") as refused:
            engine.submit(constrained("start: foo"))
        assert refused.value.field == "grammar"
        await until_idle(engine)
        assert pool.counts(0).free == NUM_BLOCKS
        await engine.close()
        engine.failed.cancel()

    asyncio.run(submit())


def test_a_sequence_that_leaves_its_grammar_is_turned_down_and_others_go_on(monkeypatch):
    """As one does whose grammar becomes too complex in the middle."""
    lost, kept = constrained(LETTERS, 30, prompt=30), constrained(LETTERS, 30)
    follow, firsts = late_masks.Place.follow, dict[str, late_masks.Place]()

    def follow_and_fail(place: late_masks.Place, num_tokens: int, end_ids: Collection[int]) -> None:
        follow(place, num_tokens, end_ids)
        if place is firsts.setdefault("first", place) and num_tokens == 7:
            place.fault = "it is too complex"

    monkeypatch.setattr(late_masks.Place, "follow", follow_and_fail)
    run = serve([lost, kept])
    assert list(run.turned_down) == [lost.id]
    assert "too complex" in str(run.turned_down[lost.id])
    assert len(run.of(lost)) == 7
    monkeypatch.undo()
    assert_keeps_to(run, kept)


def test_cancelling_a_constrained_sequence_leaves_nothing():
    asked, kept = constrained(LETTERS, 60), constrained(LETTERS, 30, prompt=30)

    def cancel(engine, run):
        if len(run.tokens.get((asked.id, 0), ())) == 9:
            engine.cancel(asked.id)

    run = serve([asked, kept], on_step=cancel)
    assert 9 <= len(run.of(asked)) < 60
    assert_keeps_to(run, kept)
