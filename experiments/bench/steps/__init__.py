"""The device side alone: steps without an engine, and what the engine adds."""
