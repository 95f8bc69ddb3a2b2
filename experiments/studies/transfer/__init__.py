"""What moving KV takes, and how much of it a client waits for."""
