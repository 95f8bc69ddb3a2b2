"""What a request used and when: metrics, rows, spans, accounts. A new metric is defined in `metrics`."""
