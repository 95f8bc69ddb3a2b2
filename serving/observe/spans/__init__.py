"""Spans for OpenTelemetry collectors. Begin with `span` and `export`."""
