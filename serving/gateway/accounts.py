"""What each request used, for whoever pays: its row in the ledger, and its tokens against its tenant's rate.

A request has an account once it was sent to a worker, however it ends then; what this gateway refused used nothing, and
has none. Tokens are those that the metrics count, so that ledger, metrics and answers add up to the same. Left out: how
a row is written (`serving.ledger`), and how a rate is kept (`rates`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.status import Overloaded
from moonshard.serving.gateway.metrics import GatewayMetrics, outcome_of
from moonshard.serving.gateway.parameters import GenerationRequest
from moonshard.serving.gateway.rates import TokenRates
from moonshard.serving.gateway.record import RequestRecord
from moonshard.serving.ledger import Ledger, Row
from moonshard.serving.prices import Prices
from moonshard.serving.tenants import Tenant


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

    def sent(self, tenant: Tenant, num_prompt: int) -> None:
        """A prompt that was admitted is on its way to a worker. Once `entry` has ended it is not."""
        if self._rates is not None:
            self._rates.hold(tenant.name, num_prompt)

    def computed(self, tenant: Tenant, num_prompt: int) -> None:
        """The first output of a prompt that was sent has come."""
        if self._rates is not None:
            self._rates.release(tenant.name, num_prompt)
            self._rates.used(tenant.name, num_prompt)

    @contextmanager
    def entry(self, request: GenerationRequest, record: RequestRecord) -> Iterator[None]:
        """The block is the request's time on workers. Sent to one, it is accounted for once, however it ends."""
        outcome = ""
        try:
            yield
            outcome = record.finish_reason
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            if record.is_sent:
                self._give_back(request.caller.tenant, record, is_refused=outcome != "cancelled")
                self._close(request, record.usage(), outcome)

    def _give_back(self, tenant: Tenant, record: RequestRecord, *, is_refused: bool) -> None:
        """Where nothing came back. A client that left all the same had its prompt computed, or may have."""
        if self._rates is None or record.has_begun:
            return
        self._rates.release(tenant.name, record.num_prompt)
        if not is_refused:
            self._rates.used(tenant.name, record.num_prompt)

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
                session="" if caller.session is None else caller.session.hex(),
                model=self._metrics.model_name,
                outcome=outcome,
                usd=self._prices.usd(**tokens),
                **tokens,
            )
            self._ledger.add(row)


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
