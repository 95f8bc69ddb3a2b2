"""How what happens leaves a process beside metrics: as rows in files, and as spans to a collector.

`rows` and `spans` hold formats, buffers and threads, for gateways and workers alike. Not here: what a request's row or
span says, which is its process's (`gateway.records`, `worker.spans`), but for a step's row (`rows.steps`).
"""
