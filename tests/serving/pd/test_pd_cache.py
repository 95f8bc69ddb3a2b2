"""What prefill or decode knows of a prompt is neither computed nor moved again, and changes no token."""

import asyncio

import pytest

from moonshard.kv.prefix import block_names
from moonshard.rpc import link_pb2
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.steps import StepKind
from moonshard.sharding.rules import DecodeRules
from moonshard.sharding.shape import MeshShape
from tests.agreement import assert_drawn_from, assert_same_tokens, reference
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import Answer, Meshes, Pair, prefill_handoffs, run, running, until_as_it_began
from tests.sizes import BLOCK_SIZE

pytestmark = pytest.mark.xdist_group("jax")
GREEDY = Sampling(temperature=0.0)
BY_TOKENS = DecodeRules(kv_tokens=("tensor",))
CACHED_MESHES = {
    "data 2 expert 2 to data 2 tensor 2 by tokens": Meshes(  # whose programs `test_mesh_pairs` runs too
        prefill=MeshShape(data=2, expert=2), decode=MeshShape(data=2, tensor=2), decode_rules=BY_TOKENS
    ),
    "data 2 to data 2": Meshes(prefill=MeshShape(data=2), decode=MeshShape(data=2)),
    "pipe 2 to tensor 2 by tokens": Meshes(
        prefill=MeshShape(pipe=2), decode=MeshShape(tensor=2), decode_rules=BY_TOKENS
    ),
    "tensor 2 to expert 2": Meshes(prefill=MeshShape(tensor=2), decode=MeshShape(expert=2)),
    "expert 2 to pipe 2": Meshes(prefill=MeshShape(expert=2), decode=MeshShape(pipe=2)),
}
FEW = ("data 2 expert 2 to data 2 tensor 2 by tokens",)


def num_landed(pair: Pair) -> int:
    return pair.decode.inspect().load.kv_transfer.num_landed_blocks


async def ask(pair: Pair, each: link_pb2.Run) -> tuple[Answer, int]:
    """The answer, checked against the reference, and how many blocks moved for it."""
    before = num_landed(pair)
    answer = await pair.ask(each)
    assert answer.cause is None
    assert len(answer.tokens[0]) == each.max_tokens
    assert_drawn_from(reference(), each.prompt_tokens, answer.tokens[0], GREEDY)
    return answer, num_landed(pair) - before


@pytest.mark.parametrize("length", [15, 16, 17, 64, 65, 300])
async def test_a_prompt_asked_again_moves_no_full_block_and_is_computed_from_the_last_of_them_on(length: int):
    async with running() as pair:
        prompt, num_full = long_text(length), length // BLOCK_SIZE
        cold, num_moved = await ask(pair, run(prompt, 20))
        assert (cold.num_cached, num_moved) == (0, -(-length // BLOCK_SIZE))
        warm, num_moved = await ask(pair, run(prompt, 20))
        assert warm.num_cached == (num_full * BLOCK_SIZE if length % BLOCK_SIZE else length - 1)
        assert num_moved == (length % BLOCK_SIZE > 0)
        assert warm.tokens == cold.tokens


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(meshes, id=name, marks=[] if name in FEW else pytest.mark.slow)
        for name, meshes in CACHED_MESHES.items()
    ],
)
async def test_on_other_meshes_a_partition_finds_its_own_prompts_again_and_no_other_does(meshes: Meshes):
    async with running(meshes=meshes) as pair:
        here, there = meshes.prefill.num_partitions - 1, meshes.decode.num_partitions - 1
        prompt = long_text(100)
        before = num_landed(pair)
        for num_cached, num_moved in ((0, 7), (96, 1)):
            each = run(prompt, 20, partition=there)
            answer = await pair.ask(each, prefill_partition=here)
            assert_drawn_from(reference(), prompt, answer.tokens[0], GREEDY)
            assert (answer.num_cached, num_landed(pair) - before) == (num_cached, num_moved)
            before = num_landed(pair)
        known = [*prompt, *answer.tokens[0]][: 7 * BLOCK_SIZE]  # by decode, to the end of a block
        alone = await pair.ask_decode_alone(run(known, 20, partition=there))
        assert alone.num_cached == len(known) - 1
        assert_drawn_from(reference(), known, alone.tokens[0], GREEDY)
        for num_cached in (96, len(known) - 1):
            both = await pair.ask(run(known, 20, partition=there), prefill_partition=here)
            assert_same_tokens(reference(), known, alone.tokens[0], both.tokens[0], GREEDY)
            assert (both.num_cached, num_landed(pair) - before) == (num_cached, 0)
        if there:
            elsewhere = await pair.ask_decode_alone(run(prompt, 20, partition=0))
            assert elsewhere.num_cached == 0
            assert elsewhere.tokens == answer.tokens


async def test_the_next_turn_moves_what_is_new_and_less_than_a_block():
    async with running() as pair:
        prompt = long_text(100)
        answer, _ = await ask(pair, run(prompt, 50))
        news = long_text(40, seed=5)
        turn = [*prompt, *answer.tokens[0], *news]
        _, num_moved = await ask(pair, run(turn, 20))
        num_new = len(turn) - (len(prompt) + 50 - 1)  # the last token's KV was never computed
        assert num_moved * BLOCK_SIZE < num_new + 2 * BLOCK_SIZE
        moved_tokens = len(turn) - (-(-len(turn) // BLOCK_SIZE) - num_moved) * BLOCK_SIZE
        assert moved_tokens < num_new + BLOCK_SIZE


async def test_decode_prefills_behind_what_it_was_given():
    async with running() as pair:
        prompt = long_text(100)
        await ask(pair, run(prompt, 20))
        longer = run([*prompt, *long_text(30, seed=2)], 20)
        before = pair.decode.engine.counters().totals.prefill_tokens
        answer = await pair.ask_decode_alone(longer)
        assert_drawn_from(reference(), longer.prompt_tokens, answer.tokens[0], GREEDY)
        assert pair.decode.engine.counters().totals.prefill_tokens - before == 130 - 96
        assert answer.num_cached == 96


async def test_what_prefill_knows_goes_out_before_the_rest_is_computed(monkeypatch: pytest.MonkeyPatch):
    async with running() as pair:
        prompt = long_text(96)
        await ask(pair, run(prompt, 2))
        monkeypatch.setattr(pair.decode._scheduler.cache, "match", lambda _partition, _names: ())
        executor, kinds = pair.prefill.engine._device._executor, []
        launch = executor.launch
        monkeypatch.setattr(executor, "launch", lambda step: (kinds.append(step.kind), launch(step))[1])
        answer, num_moved = await ask(pair, run([*prompt, *long_text(40, seed=7)], 2))
        assert (answer.num_cached, num_moved) == (96, 9)
        assert kinds[0] is StepKind.EXPORT
        assert kinds.count(StepKind.PREFILL) == 1


async def test_what_another_prompt_computes_in_the_same_step_goes_out_after_it(monkeypatch: pytest.MonkeyPatch):
    async with running(short_share=0.0) as pair:  # so that both twins wait until the busy one is over
        plans: list[PrefillPlan] = []
        prefill = prefill_handoffs(pair.prefill)
        launching = prefill.launching
        monkeypatch.setattr(prefill, "launching", lambda plan: (plans.append(plan), launching(plan))[1])
        prompt = long_text(17, seed=11)
        busy = pair.begin(run(long_text(640, seed=3), 2))
        twins = [pair.begin(run(prompt, 20)) for _ in range(2)]
        for answer in (busy, *twins):
            await answer.is_over.wait()
        assert any([chunk.start for chunk in plan.chunks][-2:] == [0, BLOCK_SIZE] for plan in plans)
        for answer in twins:
            assert_drawn_from(reference(), prompt, answer.tokens[0], GREEDY)
        assert twins[0].tokens == twins[1].tokens


async def test_a_prompt_on_its_way_is_in_every_report_of_the_worker_that_decodes_it():
    def reported() -> int:
        load = pair.decode.load(pair.link(pair.decode))
        return sum((*load.queued_tokens, *load.active_tokens, *load.reserved_tokens))

    async with running() as pair:
        assert reported() == 0
        answer = pair.begin(run(long_text(100, seed=21), 20))
        while len(answer.tokens.get(0, ())) < 2:  # the first came from the worker that prefilled
            assert pair.decode.load(pair.link(pair.decode)).num_seen == 1
            assert reported() >= 100
            await asyncio.sleep(0)
        await answer.is_over.wait()
        assert reported() == 0


@pytest.mark.parametrize("num_asked", [1, 2])
async def test_both_workers_forget_a_prompt_from_its_end(num_asked: int):
    async with running() as pair:
        prompt, answer = long_text(192, seed=51), Answer()
        for number in range(num_asked):  # a second block of what is known already stays nameless
            answer, _ = await ask(pair, run(prompt, 10 + 40 * number))
            for worker in (pair.prefill, pair.decode):
                await until_as_it_began(worker)
        for worker, tokens in ((pair.prefill, prompt), (pair.decode, [*prompt, *answer.tokens[0][:-1]])):
            pool, cache = worker._pool, worker._scheduler.cache
            names = block_names(b"", tokens, BLOCK_SIZE)
            taken = pool.allocate(0, pool.num_free(0) - len(names)) or ()
            num_known = [len(cache.match(0, names))]
            while pool.num_free(0):
                taken += pool.allocate(0, 1) or ()
                num_known.append(len(cache.match(0, names)))
            assert num_known == list(range(len(names), -1, -1))
            pool.release(0, taken)


async def test_another_root_is_cold_on_both_sides():
    async with running() as pair:
        prompt = long_text(64)
        await ask(pair, run(prompt, 20, prefix_root=b"a tenant"))
        other, num_moved = await ask(pair, run(prompt, 20, prefix_root=b"another"))
        assert (other.num_cached, num_moved) == (0, 4)
        again, num_moved = await ask(pair, run(prompt, 20, prefix_root=b"a tenant"))
        assert (again.num_cached, num_moved) == (63, 0)


async def test_who_is_preempted_beside_others_that_hold_the_same_blocks_gets_the_tokens_it_gets_alone():
    async with running() as pair:
        shared, totals = long_text(640, seed=31), lambda: pair.decode.engine.counters().totals
        prompts = [[*shared, *long_text(200, seed=40 + number)] for number in range(4)]
        await ask(pair, run(shared, 2))
        before = num_landed(pair)
        together = [pair.begin(run(prompt, 200)) for prompt in prompts]
        for answer in together:
            await answer.is_over.wait()
        assert num_landed(pair) - before <= 4 * (200 // BLOCK_SIZE + 2)  # the rest is held four times
        assert (num_preemptions := totals().num_preemptions) > 0
        assert totals().prefill_tokens <= num_preemptions * (400 + BLOCK_SIZE)  # who comes back finds what was shared
        for prompt, answer in zip(prompts, together, strict=True):
            alone, _ = await ask(pair, run(prompt, 200))
            assert_same_tokens(reference(), prompt, alone.tokens[0], answer.tokens[0], GREEDY)
        assert totals().num_preemptions == num_preemptions


async def test_pools_too_small_to_remember_everything_still_give_the_right_tokens():
    async with running() as pair:
        for number in range(12):
            await ask(pair, run(long_text(900 + 40 * (number % 3), seed=number % 4), 8))
