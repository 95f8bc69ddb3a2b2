"""Gangs: a worker of several processes that have one mesh together.

Member 0, the leader, is a worker like any other: it has the services and the control plane. The others follow: they
run the same steps in the same order (`follower`), told by the leader over one stream each (`leader`, with `steps` for
what a step is on the wire). KV that is handed over does not pass through the leader: each member moves its own part
(`part`) as the leader orders (`plane`, `orders`), and so it is with blocks in tiers (`tiers`). Whatever becomes of one
member becomes of all: a process that is missing from a collective leaves the others waiting for it, for ever (`watch`).
"""
