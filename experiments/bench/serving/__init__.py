"""The whole stack as its clients see it: latency, throughput, handoffs, failover, arrangements, start times.

Parts of a server by themselves belong to `bench.costs` and `bench.steps`; starting and stopping servers, to
`experiments.common.running`.
Begin with `served`.
"""
