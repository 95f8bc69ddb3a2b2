"""`moonshard demo`: three questions to the embedded model, and where each millisecond went.

It is not a measurement: those belong to `experiments.bench`. Grading many questions belongs to
`experiments.evaluation`.
Begin with `script`; `command` starts the server.
"""
