"""What the size of a prefill chunk costs and buys."""
