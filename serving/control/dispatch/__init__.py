"""What a gateway decides about each attempt at a request: whether it is admitted, on which workers it runs, and what
follows when it fails.

How one worker is chosen among several belongs in `control.routing`, how a handoff goes on in `control.handoff`, and the
sending of messages in `serving.gateway`.
Begin with `dispatcher`.
"""
