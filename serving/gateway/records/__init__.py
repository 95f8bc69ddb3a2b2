"""What becomes known of a request and is kept: one log for each request, and all who read it.

The pipeline appends to the log (`log`, its events in `events`) and tells nobody else. Metrics, the ledger, recorded
rows and spans read it, each in a module of its own; `readers` lists them. How rows get into files and spans to a
collector belongs in `serving.observe`; HTTP messages, which may be no requests, are counted in `http.edge`.
Begin with `events`. A new metric is defined in `metrics`, and counted of a request in `request_metrics` or, if workers
report it (`WorkerLoad` in rpc/link.proto, `worker.report`), in `worker_metrics`; a new column is filled in `rows`, a
new attribute in `spans`. What the ledger, rows and spans count of themselves is in their own modules, registered by
`readers`.
"""
