"""Prefill and decode apart, against both together."""
