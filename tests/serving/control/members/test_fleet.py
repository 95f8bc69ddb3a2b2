"""Which workers are present, fit a request, and get it, as they join, leave and report."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.members.fleet import DECODE_ROLES, PREFILL_ROLES, Fleet, Member, MemberLoad

ADDRESSES = ("a:1", "b:1", "c:1", "d:1")
ROLES = ("both", "decode", "prefill")
ALL = PREFILL_ROLES | DECODE_ROLES


def a_member(address: str = "a:1", *, epoch: int = 1, role: str = "both", num_partitions: int = 1) -> Member:
    return Member(
        address=address,
        epoch=epoch,
        role=role,
        num_partitions=num_partitions,
        fingerprint="f",
        dtype="bfloat16",
        vocab_size=100,
        block_size=16,
        max_context_tokens=1000,
    )


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(("join", "leave", "drain", "undrain")), st.integers(0, 3), st.sampled_from(ROLES)),
        max_size=30,
    )
)
def test_requests_go_to_whoever_is_there_and_does_not_drain_in_the_order_of_addresses(
    steps: list[tuple[str, int, str]],
):
    fleet, there = Fleet(ADDRESSES), dict[int, tuple[Member, bool]]()
    for epoch, (what, number, role) in enumerate(steps):
        if what == "join" and number not in there:
            member = a_member(ADDRESSES[number], epoch=epoch, role=role, num_partitions=1 + number % 2)
            fleet.join(member)
            there[number] = member, False
        elif what == "leave" and number in there:
            fleet.leave(ADDRESSES[number])
            del there[number]
        elif what.endswith("drain") and number in there:
            member, was_draining = there[number]
            is_draining = what == "drain"
            assert fleet.report(member.address, MemberLoad(is_draining=is_draining)) is (is_draining != was_draining)
            there[number] = member, is_draining
        routable = [member for _, (member, is_draining) in sorted(there.items()) if not is_draining]
        for roles in (PREFILL_ROLES, DECODE_ROLES, ALL):
            expected = [home for member in routable if member.role in roles for home in member.homes]
            assert list(fleet.homes(roles)) == expected
            assert fleet.homes(roles) is fleet.homes(roles)
            others = fleet.homes(roles, exclude={member.epoch for member in routable[:1]})
            assert list(others) == [home for home in expected if home.worker != routable[0].address]
        assert fleet.is_ready is any(member.role in DECODE_ROLES for member in routable)
        assert fleet.has_prefill is any(member.role == "prefill" for member in routable)
        prefills, decodes = ([m for m in routable if m.role in ("both", role)] for role in ("prefill", "decode"))
        assert fleet.is_complete is bool(prefills and decodes)
        assert (fleet.limits is None) is (not there)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fingerprint", "g", "not routed to, fingerprint is 'g' where the other workers have 'f'"),
        ("dtype", "float8", "not routed to, dtype is 'float8' where the other workers have 'bfloat16'"),
        ("vocab_size", 99, "not routed to, vocab_size is 99 where the other workers have 100"),
        ("block_size", 32, "not routed to, block_size is 32 where the other workers have 16"),
        ("role", "king", "not routed to, role 'king' is none"),
    ],
)
def test_the_first_sets_the_measure_until_nobody_is_there(field: str, value: object, message: str):
    fleet = Fleet(ADDRESSES)
    fleet.join(a_member("a:1", epoch=1))
    other = replace(a_member("b:1", epoch=2), **{field: value})
    misfit = fleet.misfit(other)
    assert misfit is not None
    assert (misfit.field, misfit.message) == (field, message)
    fleet.leave("a:1")
    assert (fleet.misfit(other) is None) is (field != "role")


def test_a_process_is_one_member_and_another_process_is_another():
    fleet = Fleet(ADDRESSES)
    fleet.join(a_member("a:1", epoch=7))
    misfit = fleet.misfit(a_member("b:1", epoch=7))
    assert misfit is not None
    assert (misfit.field, misfit.message) == ("epoch", "not routed to, the same process as at a:1")
    fleet.leave("a:1")
    assert fleet.misfit(a_member("b:1", epoch=7)) is None


def test_members_may_differ_in_context_and_the_least_of_those_there_holds():
    fleet = Fleet(ADDRESSES)
    for number, max_context_tokens in enumerate((900, 100)):
        fleet.join(replace(a_member(ADDRESSES[number], epoch=number), max_context_tokens=max_context_tokens))
    assert fleet.limits is not None
    assert fleet.limits.max_context_tokens == 100
    fleet.leave(ADDRESSES[1])
    assert fleet.limits.max_context_tokens == 900
