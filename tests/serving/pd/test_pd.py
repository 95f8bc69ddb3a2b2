"""Prefill on one worker, decode on another: the same tokens as one worker gives, and nothing left behind."""

import asyncio

import numpy as np
import pytest

from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import decode_handoffs, run, running, until_as_it_began
from tests.sizes import BLOCK_SIZE, NUM_SLOTS

pytestmark = pytest.mark.xdist_group("jax")
LENGTHS = [15, 16, 17, 63, 64, 65, 300, 1500]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_handed_over_request_gives_the_reference_tokens_at_every_awkward_length(temperature):
    async with running() as pair:
        sampling = {"temperature": temperature, "seed": 7}
        runs = [run(long_text(length, seed=length), 64, sampling=sampling) for length in LENGTHS]
        answers = await asyncio.gather(*(pair.ask(each) for each in runs))
        for each, answer in zip(runs, answers, strict=True):
            assert answer.cause is None
            assert len(answer.tokens[0]) == 64
            drawn = Sampling(temperature=temperature, seed=7)
            assert_drawn_from(reference(), each.prompt_tokens, answer.tokens[0], drawn)
        kv = pair.decode.inspect().load.kv_transfer
        assert kv.num_landed_blocks == sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
        assert pair.prefill.inspect().load.kv_transfer.published_bytes == kv.landed_bytes


async def test_choices_share_one_handoff():
    async with running() as pair:
        each = run(long_text(50), 20, sampling={"temperature": 3.0, "seed": 3}, n=3)
        answer = await pair.ask(each)
        assert len({tokens[0] for tokens in answer.tokens.values()}) == 3, "a mix-up of first tokens would not show"
        for choice in range(3):
            drawn = Sampling(temperature=3.0, seed=3)
            assert_drawn_from(reference(), each.prompt_tokens, answer.tokens[choice], drawn, choice)
        assert pair.decode.inspect().load.kv_transfer.num_landed_blocks == 4


async def test_a_first_token_that_ends_the_request_needs_no_decode():
    async with running() as pair:
        prompt = long_text(40)
        first = (await pair.ask(run(prompt, 2))).tokens[0][0]
        stopped = await pair.ask(run(prompt, 20, stop_token_ids=[first]))
        assert (stopped.tokens, stopped.finish) == ({0: [first]}, {0: 1})
        short = await pair.ask(run(prompt, 1))
        assert (short.tokens, short.finish) == ({0: [first]}, {0: 2})


async def test_pages_are_bit_equal_after_landing_in_bfloat16():
    async with running(dtype="bfloat16") as pair:
        length = 200
        await pair.ask(run(long_text(length), 2))
        pages = [
            np.asarray(worker._model.programs.stages[0].state.pages).view(np.uint16)
            for worker in (pair.prefill, pair.decode)
        ]
        full, rest = divmod(length, BLOCK_SIZE)
        assert (pages[0][:full] == pages[1][:full]).all()
        assert (pages[0][full, :, :rest] == pages[1][full, :, :rest]).all()
        assert pages[0][:full].any()


async def test_first_tokens_do_not_wait_for_the_transfer():
    async with running(num_slab_cells=1) as pair:
        answer = await pair.ask(run(long_text(600), 4))
        assert answer.first_tokens_came_before_last_chunk
        assert answer.phases.prefill_ms > 0
        assert answer.phases.decode_ms > 0


async def test_a_crowd_is_prefilled_no_faster_than_slots_come_free_and_none_waits_for_the_clock():
    async with running(num_slab_cells=64) as pair:
        decode = decode_handoffs(pair.decode)
        decode.tick = lambda: None
        most = 0

        def note(message, link, forward=pair.to_decode):
            nonlocal most
            forward(message, link)
            begun = [answer for answer in pair.answers.values() if answer.tokens and not answer.is_over.is_set()]
            most = max(most, len(begun))

        pair.to_decode = note
        runs = [run(long_text(40, seed=number), 60) for number in range(16)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(pair.ask(each) for each in runs))
        assert [len(answer.tokens[0]) for answer in answers] == [60] * 16
        assert most == NUM_SLOTS + 1


async def test_the_next_is_prefilled_as_soon_as_the_one_ahead_of_its_slot_has_it():
    async with running(num_slab_cells=64) as pair:
        decode = decode_handoffs(pair.decode)
        decode.tick = lambda: None
        prompt = long_text(40)
        stop = (await pair.ask(run(prompt, 20))).tokens[0][-1]  # it ends while its next step is under way
        pair.begin(run(prompt, 500, stop_token_ids=[stop]))
        others = [pair.begin(run(long_text(40, seed=number), 500)) for number in range(NUM_SLOTS)]
        last, is_prefilling = run(long_text(40, seed=9), 5), asyncio.Event()

        def note(message, link, forward=pair.to_prefill):
            forward(message, link)
            if message.run.request_id == last.request_id:
                is_prefilling.set()

        pair.to_prefill = note
        pair.begin(last)
        async with asyncio.timeout(60):
            await is_prefilling.wait()
            assert not any(other.is_over.is_set() for other in others)
            await asyncio.gather(*(answer.is_over.wait() for answer in pair.answers.values()))


async def test_a_cancel_at_any_moment_leaves_nothing():
    async with running() as pair:
        for num_rounds in range(40):
            each = run(long_text(100 + num_rounds), 50)
            answer = pair.begin(each)
            for _ in range(num_rounds * 3):
                await asyncio.sleep(0)
            pair.cancel(each)
            await answer.is_over.wait()
        for worker in (pair.prefill, pair.decode):
            await until_as_it_began(worker)


async def test_a_corrupt_checksum_fails_the_handoff_and_decodes_nothing():
    async with running() as pair:
        forward = pair.to_decode

        def corrupt(message, link):
            if message.WhichOneof("message") == "start":
                message.start.last.checksums[0] ^= 1
            forward(message, link)

        pair.to_decode = corrupt
        answer = await pair.ask(run(long_text(30), 8))
        assert answer.cause is m.Cause.CORRUPT
        assert sum(map(len, answer.tokens.values())) <= 1
