"""How often an agent's turn finds its session's KV again, by policy."""
