"""Where the milliseconds of some requests went, as one table: a column for each request, by the gateway's own account.

The phases follow each other and add up to the whole. What stands below them lies inside the phases and adds up to
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from moonshard.rpc.types import Timing

Row = tuple[str, float]  # what the time went to, milliseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What one request was and how its time was spent."""

    title: str
    num_prompt_tokens: int
    num_completion_tokens: int
    timing: Timing

    @property
    def tokens_a_step(self) -> float:
        """Of those behind the first, which the prefill gave: 1 where no guess was right. 0 without such a step."""
        num_outputs = self.timing.num_outputs - 1
        return (self.num_completion_tokens - 1) / num_outputs if num_outputs > 0 else 0.0


def phase_rows(timing: Timing) -> list[Row]:
    """The gateway's phases, with the workers' shares of the long ones apart. Their sum is `timing.e2e_ms`.

    The wire is one row: workers' times after the first token begin when they have it, and the gateway's phase when it
    has arrived, so that what a slow way adds before the first token it takes off after it.
    """
    after_first = (timing.exposed_transfer_ms, timing.land_ms, timing.join_ms, timing.worker_decode_ms)
    return [
        ("gateway: template, route", timing.gateway_queue_ms),
        ("gateway: lost attempts", timing.lost_ms),
        ("decode: wait for room", timing.decode_queue_ms),
        ("prefill: wait for a step", timing.worker_queue_ms),
        ("prefill: compute", timing.worker_prefill_ms),
        ("transfer: exposed rest", timing.exposed_transfer_ms),
        ("decode: land last chunk", timing.land_ms),
        ("decode: join the batch", timing.join_ms),
        ("decode: the other tokens", timing.worker_decode_ms),
        ("wire: there, between, back", timing.wire_ms + timing.decode_ms - sum(after_first)),
        ("gateway: finish stream", timing.finish_ms),
    ]


def handoff_rows(timing: Timing) -> list[Row]:
    """How good a handoff is. Exposed is what came after the first token; the prefill hid the rest."""
    return [
        ("time to the first token", timing.ttft_ms),
        ("first token to second", timing.handoff_gap_ms),
        ("transfer in all", timing.transfer_ms),
        ("of it hidden by prefill", timing.transfer_ms - timing.exposed_transfer_ms),
    ]


def time_table(accounts: Sequence[Account]) -> Table:
    """At least one account; narrow enough, with six, for a terminal of 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=0)
    table.add_column("milliseconds", no_wrap=True)
    for account in accounts:
        table.add_column(account.title, justify="right", no_wrap=True)
    timings = [account.timing for account in accounts]
    _add_section(table, [phase_rows(timing) for timing in timings])
    _add_section(table, [[("end to end", timing.e2e_ms)] for timing in timings])
    _add_section(table, [handoff_rows(timing) for timing in timings])
    table.add_row("prompt tokens", *(f"{account.num_prompt_tokens:,}" for account in accounts))
    table.add_row("completion tokens", *(f"{account.num_completion_tokens:,}" for account in accounts))
    table.add_row("tokens a decode step, 1 to 4", *(f"{account.tokens_a_step:.1f}" for account in accounts))
    return table


def _add_section(table: Table, by_account: Sequence[Sequence[Row]]) -> None:
    """Rows of the same names, one list of them for each account."""
    for cells in zip(*by_account, strict=True):
        table.add_row(cells[0][0], *(f"{elapsed_ms:.1f}" for _, elapsed_ms in cells))
    table.add_section()
