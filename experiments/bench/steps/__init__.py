"""The device side alone: steps without an engine, what the engine adds, and writing into the KV pages.

Whatever needs a server belongs to `bench.serving`; a GPU's own figures belong to `bench.gpu`.
Begin with `bare_steps`; `device` runs them in a process of their own.
"""
