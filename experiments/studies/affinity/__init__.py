"""How often an agent's turn finds its session's KV again, by routing policy.

The policies belong to `serving.control.routing`, replaying a trace without workers to `experiments.replay`.
Begin with README.md, then `analysis`.
"""
