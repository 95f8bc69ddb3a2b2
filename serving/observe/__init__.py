"""How records of what happens leave a process: as rows in files (`rows`) and as spans to a collector (`spans`).

Formats, buffers and threads are here, for gateways and workers alike. What a request's row or span says belongs to the
process that has the request (`gateway.records`, `worker.spans`); only a step's row is filled here (`rows.steps`).
Metrics are in `gateway.records`.
Begin with `rows.recorder` and `spans.export`.
"""
