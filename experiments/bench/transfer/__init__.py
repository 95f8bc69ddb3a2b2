"""How fast KV moves."""
