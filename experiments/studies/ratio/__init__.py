"""How many workers should prefill, and how many decode."""
