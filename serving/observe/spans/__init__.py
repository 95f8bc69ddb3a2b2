"""Spans in OpenTelemetry's sense: whose trace a request belongs to, what a span is, and how it gets to a collector.

Begin with `span`; `context` is the W3C headers and who is sampled, `export` the queue and its thread, `otlp` the only
import of OpenTelemetry, `environment` its variables. Not here: who has which spans (`gateway.records.spans`,
`worker.spans`).
"""
