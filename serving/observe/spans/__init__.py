"""Spans in OpenTelemetry's sense: which trace a request belongs to, what a span is, and how it gets to a collector.

`context` has the W3C headers and decides who is sampled, `export` has the queue and its thread, `otlp` is the only
import of OpenTelemetry, and `environment` reads its variables. Which spans there are belongs in `gateway.records.spans`
and `worker.spans`.
Begin with `span`.
"""
