"""From a checked request to a stream of events, whichever front it came through.

Where an attempt runs is decided in `control.dispatch`; links to workers are in `gateway.workers`, what is recorded of a
request in `gateway.records`.
Begin with `generation`, then `attempts`.
"""
