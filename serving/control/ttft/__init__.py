"""The time to first token (TTFT) that is predicted of a request, and which requests are refused for it. Pure.

Begin with `forecast`: of a request that is reserved on a worker. `model` is what it learns, `bound` what is too late.
"""
