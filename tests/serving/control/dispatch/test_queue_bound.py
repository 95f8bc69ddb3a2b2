"""Which requests the bound admits, held against two plain sets."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.dispatch.queue_bound import QueueBound, TooManyWaiting


@given(
    max_waiting=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(("enter", "enter", "begun", "leave")), st.integers(0, 9)), max_size=40),
)
def test_no_more_wait_for_their_first_token_than_may_and_those_that_have_it_keep_nobody_out(
    max_waiting: int, steps: list[tuple[str, int]]
):
    bound, waiting, begun = QueueBound(max_waiting), list[int](), list[int]()
    for what, which in steps:
        running = waiting + begun
        if what == "enter":
            answer = bound.enter()
            if len(waiting) == max_waiting:
                assert answer == TooManyWaiting(max_waiting)
            else:
                assert isinstance(answer, int)
                assert answer not in running
                waiting.append(answer)
        elif running:
            number = running[which % len(running)]
            if number in waiting:
                waiting.remove(number)
            else:
                begun.remove(number)
            if what == "begun":
                bound.begun(number)
                begun.append(number)
            else:
                bound.leave(number)
        assert bound.num_running == len(waiting) + len(begun)
