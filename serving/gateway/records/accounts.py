"""What each request used, for whoever pays: its row in the ledger, and its tokens against its tenant's rate.

A request has an account once it was sent to a worker, however it ends then; what this gateway refused used nothing, and
has none. Tokens are those that the metrics count, so that ledger, metrics and answers add up to the same. Left out: how
a row is written (`records.ledger`), and how a rate is kept (`rates`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import Overloaded
from moonshard.serving.config.prices import Prices
from moonshard.serving.config.tenants import Tenant
from moonshard.serving.gateway.records.ledger import Ledger, Row
from moonshard.serving.gateway.records.metrics import GatewayMetrics, outcome_of
from moonshard.serving.gateway.records.rates import TokenRates
from moonshard.serving.gateway.records.record import RequestRecord
from moonshard.serving.gateway.request import GenerationRequest


class Accounts:
    """Of one gateway. Without a ledger nothing is written; without rates nobody is refused."""

    def __init__(
        self, metrics: GatewayMetrics, prices: Prices, *, ledger: Ledger | None, rates: TokenRates | None
    ) -> None:
        self._metrics = metrics
        self._prices = prices
        self._ledger = ledger
        self._rates = rates

    def admit(self, tenant: Tenant, num_prompt: int) -> None:
        """Overloaded where the tenant has used up its tokens."""
        try:
            if self._rates is not None:
                self._rates.admit(tenant.name, num_prompt)
        except Overloaded:
            self._metrics.rate_rejections.inc()
            raise

    @contextmanager
    def entry(self, request: GenerationRequest, record: RequestRecord) -> Iterator["PromptHold"]:
        """The block is the request's time on workers. Sent to one, it is accounted for once, however it ends."""
        outcome, hold = "", PromptHold(self._rates, request.caller.tenant, record.num_prompt)
        try:
            yield hold
            outcome = record.finish_reason
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            hold.close(is_refused=outcome != "cancelled")
            if record.is_sent:
                self._close(request, record.usage(), outcome)

    def _close(self, request: GenerationRequest, usage: pb.Usage, outcome: str) -> None:
        caller = request.caller
        if self._rates is not None:
            self._rates.used(caller.tenant.name, usage.completion_tokens)
        if self._ledger is not None:
            tokens = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
            row = Row(
                request_id=request.request_id,
                ended_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                tenant=caller.tenant.name,
                session="" if caller.affinity_key is None else caller.affinity_key.hex(),
                model=self._metrics.model_name,
                outcome=outcome,
                usd=self._prices.usd(**tokens),
                **tokens,
            )
            self._ledger.add(row)


class PromptHold:
    """One prompt's tokens against its tenant's rate: not held, then held, then used or given back, once."""

    def __init__(self, rates: TokenRates | None, tenant: Tenant, num_prompt: int) -> None:
        self._rates = rates
        self._tenant = tenant.name
        self._num_prompt = num_prompt
        self._is_held = False

    def sent(self) -> None:
        """It was admitted, and is on its way to a worker."""
        if self._rates is not None:
            self._rates.hold(self._tenant, self._num_prompt)
            self._is_held = True

    def computed(self) -> None:
        """Its first output has come."""
        self._settle(is_used=True)

    def close(self, *, is_refused: bool) -> None:
        """At the request's end. Without a first output the tokens of a refused one are given back.

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
