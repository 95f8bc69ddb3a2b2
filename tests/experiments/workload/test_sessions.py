"""Turns of sessions: each follows the one before, and a client plays one session at a time."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.workload.sessions import sessions


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4), max_size=8),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.5)),
)
def test_turns_follow_each_other_and_clients_play_one_session_at_a_time(prompts, num_clients: int, think_s: float):
    found = sessions(prompts, max_tokens=2, num_clients=num_clients, mean_think_s=think_s).requests
    assert [request.prompt.tokens() for request in found] == [turn for session in prompts for turn in session]
    under_way = [request for request in found if request.after is None]
    assert len(under_way) == min(num_clients, len(prompts))
    followed = [request.after for request in found if request.after is not None]
    assert len(set(followed)) == len(followed)  # nobody is waited for by two
    for request in found:
        if request.turn:
            assert request.after is not None
            before = found[request.after]
            assert (before.session, before.turn) == (request.session, request.turn - 1)
            assert (request.pause_s > 0) == (think_s > 0)
