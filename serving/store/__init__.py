"""This machine's end of Mooncake Store, as a process of a deployment: `process`. What workers do with it is
`serving.worker.store`'s.
"""
