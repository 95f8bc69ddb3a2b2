"""Who reads the logs of a gateway's requests, as its configuration says; what they can lose is counted beside them."""

from functools import partial

from moonshard.serving.config.keys import Config, TelemetryConfig
from moonshard.serving.gateway.records.accounts.accounts import Accounts, LedgerCollector
from moonshard.serving.gateway.records.accounts.ledger import Ledger
from moonshard.serving.gateway.records.accounts.rates import TokenRates
from moonshard.serving.gateway.records.log import OpenReader, RequestLogs
from moonshard.serving.gateway.records.metrics import GatewayMetrics
from moonshard.serving.gateway.records.request_metrics import RequestMetrics
from moonshard.serving.gateway.records.rows import LostRowMetrics, RecordedRequests
from moonshard.serving.gateway.records.spans import LostSpanMetrics, RequestSpans
from moonshard.serving.observe.rows.recorder import Recorder
from moonshard.serving.observe.spans.context import TraceSampling
from moonshard.serving.observe.spans.export import SpanExport


def request_logs(
    config: Config,
    metrics: GatewayMetrics,
    *,
    ledger: Ledger | None,
    rates: TokenRates | None,
    recorder: Recorder | None,
    export: SpanExport | None,
) -> RequestLogs:
    """The logs with their readers, which read in this order. A new reader is added here."""
    accounts = Accounts(model=metrics.model_name, prices=config.prices, ledger=ledger, rates=rates)
    readers: list[OpenReader] = [partial(RequestMetrics, metrics), accounts.reader]
    if ledger is not None:
        metrics.registry.register(LedgerCollector(ledger))
    if recorder is not None:
        metrics.registry.register(LostRowMetrics(recorder))
        readers.append(RecordedRequests(metrics.model_name, recorder, has_tokens=config.trace.tokens).reader)
    if export is None:
        return RequestLogs(readers)
    metrics.registry.register(LostSpanMetrics(export))
    readers.append(RequestSpans(export, metrics.model_name, config.gateway.host).reader)
    return RequestLogs(readers, _sampling(config.telemetry))


def _sampling(telemetry: TelemetryConfig) -> TraceSampling:
    ratio = 1.0 if telemetry.sampled_ratio is None else telemetry.sampled_ratio
    return TraceSampling(ratio, is_parent_based=telemetry.parent_based is not False)
