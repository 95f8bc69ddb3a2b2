"""Tiers of a gang: each member has its own, for the partitions that its devices are.

The leader decides what goes down and comes up, as in a worker of one process; it asks a member's tiers by `member`, and
the member answers by `part`. Bytes stay in the member that has the devices: on the stream between them are names.
"""
