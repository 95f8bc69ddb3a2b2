"""A leader lets in who is like it, waits for all and no longer than it may; one fault is everybody's, by its name."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.serving.config.keys import ConfigError
from moonshard.serving.gang.leader import Gang
from moonshard.serving.gang.members import GangFault
from tests.serving.gang.scripted_members import MADE_OF, ScriptedFollower, following, leading

pytestmark = pytest.mark.timeout(60)
JOIN_S = 0.2
LONG_S = 20.0


@pytest.mark.parametrize("what", list(MADE_OF))
async def test_a_follower_that_is_unlike_is_refused_by_what_it_has_another_of(what: str):
    async with leading(2) as (gang, address), following(address) as follower:
        await follower.hello(1, {**MADE_OF, what: "another"})
        told = f"{what} (another instead of {MADE_OF[what]})" if "." in what else what  # a key is told with its values
        assert await follower.ending() == (grpc.StatusCode.FAILED_PRECONDITION, f"member 1 has another {told}")
        assert not gang.failed.done()  # a like one may still come


@pytest.mark.parametrize("member", [0, 2, 7])
async def test_a_member_that_the_gang_does_not_have_is_refused(member: int):
    async with leading(2) as (_, address), following(address) as follower:
        await follower.hello(member)
        assert await follower.ending() == (grpc.StatusCode.INVALID_ARGUMENT, f"member {member} is none of 1 to 1")


async def test_a_follower_of_another_protocol_is_refused():
    async with leading(2) as (_, address), following(address) as follower:
        await follower.hello(1, protocol_version=PROTOCOL_VERSION + 1)
        code, told = await follower.ending()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert told.startswith(f"protocol_version is {PROTOCOL_VERSION + 1}")


async def test_who_does_not_begin_with_hello_is_refused():
    async with leading(2) as (_, address), following(address) as follower:
        await follower.ready()
        assert (await follower.ending())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_member_that_is_there_is_there_once():
    async with leading(3) as (gang, address), following(address, 1), following(address, 2) as other:
        await gang.gather(LONG_S)
        async with following(address, 1) as second:
            told = grpc.StatusCode.FAILED_PRECONDITION, "there is a member 1 already"
            assert await second.ending() == told
        gang.welcome("10.0.0.1:7")
        assert (await other.hears("welcome")).welcome.coordinator == "10.0.0.1:7"
        assert not gang.failed.done()


async def test_who_never_joins_is_named_after_a_time():
    async with leading(4) as (gang, address), following(address, 2):
        with pytest.raises(ConfigError, match=r"gang_join_timeout_s: member 1, 3 has not joined the gang in 0\.2 s"):
            await gang.gather(JOIN_S)


async def test_who_never_loads_is_named_after_a_time():
    async with leading(3) as (gang, address), following(address, 1) as one, following(address, 2):
        await gang.gather(LONG_S)
        await one.ready()
        with pytest.raises(ConfigError, match=r"member 2 has not loaded in 0\.2 s"):
            await gang.wait_ready(JOIN_S)


@pytest.mark.parametrize(("is_startup", "expected"), [(True, ConfigError), (False, GangFault)])
async def test_what_a_follower_cannot_do_ends_the_start_in_its_words(is_startup: bool, expected: type[Exception]):
    async with leading(2) as (gang, address), following(address, 1) as follower:
        await gang.gather(LONG_S)
        await follower.say(fault=link_pb2.FollowerFault(message="model.path: there is none", is_startup=is_startup))
        with pytest.raises(expected, match=r"member 1 of the gang: model\.path: there is none"):
            await gang.wait_ready(LONG_S)


async def a_gang(stack: AsyncExitStack, num_members: int, timeout_s: float) -> tuple[Gang, list[ScriptedFollower]]:
    """All are ready."""
    gang, address = await stack.enter_async_context(leading(num_members, timeout_s=timeout_s))
    followers = [await stack.enter_async_context(following(address, member)) for member in range(1, num_members)]
    await gang.gather(LONG_S)
    for follower in followers:
        await follower.ready()
    await gang.wait_ready(LONG_S)
    return gang, followers


async def fault_of(gang: Gang) -> str:
    await asyncio.wait({gang.failed})
    return str(gang.failed.exception())


async def test_a_follower_whose_stream_breaks_is_noticed_at_once():
    async with AsyncExitStack() as stack:
        gang, (_, second) = await a_gang(stack, 3, LONG_S)
        second.break_off()
        assert await fault_of(gang) == "member 2 of the gang went away"


async def beats(follower: ScriptedFollower) -> None:
    while True:
        await follower.say(beat=link_pb2.FollowerBeat())
        await asyncio.sleep(0.05)


async def test_a_follower_that_says_nothing_is_noticed_and_named():
    async with AsyncExitStack() as stack:
        gang, (first, _) = await a_gang(stack, 3, 1.0)
        beating = asyncio.create_task(beats(first))
        assert await fault_of(gang) == "nothing came from member 2 of the gang for 1 s (worker.gang_timeout_s)"
        beating.cancel()


async def test_a_follower_that_beats_and_finishes_no_step_is_noticed_and_named():
    async with AsyncExitStack() as stack:
        gang, followers = await a_gang(stack, 3, 1.0)
        beating = [asyncio.create_task(beats(follower)) for follower in followers]
        gang.tell(link_pb2.LeaderMessage(step=link_pb2.GangStep(number=0)))
        gang.done(0, b"")
        await followers[0].hears("step")
        await followers[0].say(done=link_pb2.FollowerDone(number=0))
        assert (await fault_of(gang)).startswith("member 2 of the gang finished no step for 1 s")
        for task in beating:
            task.cancel()


async def test_a_leader_whose_own_device_hangs_is_noticed_though_it_beats():
    async with AsyncExitStack() as stack:
        gang, [follower] = await a_gang(stack, 2, 1.0)
        beating = asyncio.create_task(beats(follower))
        gang.tell(link_pb2.LeaderMessage(step=link_pb2.GangStep(number=0)))
        await follower.say(done=link_pb2.FollowerDone(number=0))
        assert (await fault_of(gang)).startswith("the leader of the gang finished no step for 1 s")
        beating.cancel()


async def test_nobody_is_stuck_in_a_step_whose_masks_the_leader_does_not_know_yet():
    async with AsyncExitStack() as stack:
        gang, [follower] = await a_gang(stack, 2, 0.5)
        beating = asyncio.create_task(beats(follower))
        gang.tell(link_pb2.LeaderMessage(step=link_pb2.GangStep(number=0, is_masked=True)))
        await asyncio.wait({gang.failed}, timeout=1.5)
        assert not gang.failed.done()
        gang.tell(link_pb2.LeaderMessage(masks=link_pb2.GangMasks(sequence=1)))
        gang.done(0, b"")
        assert (await fault_of(gang)).startswith("member 1 of the gang finished no step for 0.5 s")
        beating.cancel()


async def test_a_follower_that_is_told_to_end_has_the_leader_told():
    told = asyncio.Event()
    async with leading(2, on_leaving=told.set) as (gang, address), following(address, 1) as follower:
        await gang.gather(LONG_S)
        await follower.say(leaving=link_pb2.FollowerLeaving())
        await told.wait()
        assert not gang.failed.done()


async def test_members_that_have_loaded_something_else_are_named_and_so_is_what_it_is():
    async with leading(3) as (gang, address), following(address, 1) as first, following(address, 2) as second:
        await gang.gather(LONG_S)
        await first.ready({"number of blocks": "7"})
        await second.ready({"number of blocks": "6"})
        await gang.wait_ready(LONG_S)
        with pytest.raises(ConfigError, match="member 2 of the gang has loaded another number of blocks"):
            gang.check_alike({"number of blocks": "7"})


async def test_who_waits_for_a_member_that_was_refused_hears_why_in_the_end():
    async with leading(2) as (gang, address), following(address) as follower:
        await follower.hello(1, {**MADE_OF, "kv.num_blocks": "3"})
        await follower.ending()
        with pytest.raises(ConfigError, match=r"refused: member 1 has another kv\.num_blocks \(3 instead of 2\)"):
            await gang.gather(JOIN_S)


async def test_members_that_draw_unlike_tokens_end_the_gang_and_are_told_apart():
    async with AsyncExitStack() as stack:
        gang, (first, second) = await a_gang(stack, 3, LONG_S)
        for number in range(3):
            gang.done(number, b"same")
            for follower in (first, second):
                await follower.say(done=link_pb2.FollowerDone(number=number, drawn=b"same"))
        gang.done(3, b"one")
        await first.say(done=link_pb2.FollowerDone(number=3, drawn=b"one"))
        await second.say(done=link_pb2.FollowerDone(number=3, drawn=b"another"))
        told = await fault_of(gang)
        assert told.startswith("members drew different tokens in step 3: ")
        assert told.endswith("member 2 of the gang")
        assert not gang._drawn.keys() & {0, 1, 2}  # what all have said is forgotten


async def test_members_without_the_last_stage_are_not_waited_for_to_draw():
    async with (
        leading(3, num_drawing=2) as (gang, address),
        following(address, 1) as first,
        following(address, 2) as second,
    ):
        await gang.gather(LONG_S)
        for number in range(3):
            gang.done(number, b"same")
            await second.say(done=link_pb2.FollowerDone(number=number))
            await first.say(done=link_pb2.FollowerDone(number=number, drawn=b"same"))
        await first.ready()
        await second.ready()
        await gang.wait_ready(LONG_S)
        assert not gang._drawn
        assert not gang.failed.done()


async def test_an_answer_that_nobody_asked_for_ends_the_gang():
    async with AsyncExitStack() as stack:
        gang, (first,) = await a_gang(stack, 2, LONG_S)
        await first.say(answer=link_pb2.FollowerAnswer(number=4, copied=link_pb2.KvCopied()))
        assert await fault_of(gang) == "member 1 of the gang answers order 4, which it was not asked"


async def test_steps_come_to_all_in_their_order_and_an_end_in_order_is_no_fault():
    async with AsyncExitStack() as stack:
        gang, followers = await a_gang(stack, 3, LONG_S)
        for number in range(20):
            gang.tell(link_pb2.LeaderMessage(step=link_pb2.GangStep(number=number)))
        for follower in followers:
            heard = [(await follower.hears("step")).step.number for _ in range(20)]
            assert heard == list(range(20))
        ending = asyncio.create_task(gang.end())
        for follower in followers:
            await follower.hears("end")
            follower.break_off()
        await ending
        assert not gang.failed.done()
