"""What decides: which requests run in which step, what a handoff does next, where a request goes.

Pure: no device, no network, no clock; whoever drives it says what happened and does what it is told. Begin with
`request` and `plan`, the nouns, then `batching.scheduler`.
"""
