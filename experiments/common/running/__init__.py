"""Servers as child processes, started as a user starts them, and the measurements that come of them.

What is asked of a server belongs to `experiments.workload` and the clients of each command.
Begin with `server` (one `moonshard serve`), then `deployment` (each process by itself).
"""
