"""What each request used, for whoever pays: its row in the ledger, and its tokens against its tenant's rate.

A request has an account once it was sent to a worker, however it ends then; what this gateway refused used nothing, and
has none. Tokens are those that the metrics count, so that ledger, metrics and answers add up to the same. How a row is
written is `ledger`'s, and how a rate is kept `rates`'.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.serving.config.prices import Prices
from moonshard.serving.config.tenants import Tenant
from moonshard.serving.gateway.records.accounts.ledger import Ledger, LedgerRow
from moonshard.serving.gateway.records.accounts.rates import TokenRates
from moonshard.serving.gateway.records.events import AttemptSent, LogEvent, RequestEnded, TokensArrived
from moonshard.serving.gateway.records.log import Reader, RequestLog
from moonshard.serving.observe.spans.span import CANCELLED


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """The accounts of one gateway. Without a ledger nothing is written; without rates nobody's tokens are counted."""

    model: str
    prices: Prices
    ledger: Ledger | None
    rates: TokenRates | None

    def reader(self, log: RequestLog) -> Reader | None:
        return None if self.ledger is None and self.rates is None else RequestAccount(self, log)


class RequestAccount:
    """The account of one request: a reader of its log."""

    def __init__(self, accounts: Accounts, log: RequestLog) -> None:
        self._accounts = accounts
        self._log = log
        self._hold: PromptHold | None = None  # until it is sent

    def __call__(self, event: LogEvent) -> None:
        match event:
            case TokensArrived():
                if self._hold is not None:
                    self._hold.computed()
            case AttemptSent():
                if self._hold is None:
                    self._hold = PromptHold(
                        self._accounts.rates, self._log.request.caller.tenant, self._log.tokenized.num_prompt_tokens
                    )
            case RequestEnded():
                if self._hold is not None:
                    self._hold.close(is_refused=event.outcome != CANCELLED)
                    self._close(event)
            case _:
                pass

    def _close(self, ended: RequestEnded) -> None:
        accounts, caller, usage = self._accounts, self._log.request.caller, self._log.usage()
        if accounts.rates is not None:
            accounts.rates.used(caller.tenant.name, usage.completion_tokens)
        if accounts.ledger is not None:
            tokens = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
            row = LedgerRow(
                request_id=self._log.request.request_id,
                ended_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                tenant=caller.tenant.name,
                session="" if caller.affinity_key is None else caller.affinity_key.hex(),
                model=accounts.model,
                outcome=self._log.finish_reason if ended.is_complete else ended.outcome,
                usd=accounts.prices.usd(**tokens),
                cached_by_tier=dict(usage.cached_by_tier),
                **tokens,
            )
            accounts.ledger.add(row)


class PromptHold:
    """One prompt's tokens against its tenant's rate: held from the beginning, then used or given back, once."""

    def __init__(self, rates: TokenRates | None, tenant: Tenant, num_prompt: int) -> None:
        """The request was admitted, and is on its way to a worker."""
        self._rates = rates
        self._tenant = tenant.name
        self._num_prompt = num_prompt
        self._is_held = rates is not None
        if rates is not None:
            rates.hold(self._tenant, num_prompt)

    def computed(self) -> None:
        """An output has come, so the prompt was computed and its tokens are used."""
        self._settle(is_used=True)

    def close(self, *, is_refused: bool) -> None:
        """Called at the request's end. The tokens of a request that was refused before its first output are given back.

        A client that left may have had its prompt computed, so its tokens are used.
        """
        self._settle(is_used=not is_refused)

    def _settle(self, *, is_used: bool) -> None:
        if self._rates is None or not self._is_held:
            return
        self._is_held = False
        self._rates.release(self._tenant, self._num_prompt)
        if is_used:
            self._rates.used(self._tenant, self._num_prompt)


class LedgerCollector(Collector):
    """Whether the ledger can be written: the failures are what to raise an alarm on."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "moonshard_ledger_failures",
            "Times that a row could not be written, as on a full disk: above 0, accounts are late or lost.",
            self._ledger.num_failures,
        )
        yield CounterMetricFamily(
            "moonshard_ledger_lost_rows", "Requests that no account is kept of.", self._ledger.num_lost
        )
        yield GaugeMetricFamily(
            "moonshard_ledger_pending_rows", "Accounts that wait for room on the disk.", self._ledger.num_pending
        )
