"""A worker's tiers below the device's pages: what is fetched before a request begins, and what is written behind it.

Begin with `store`. `fetching` holds a request back until its blocks came or waiting is no longer worth it, `writing`
takes complete blocks down, `opening` makes the tiers that the configuration asks for, `places` is how they are asked:
in a gang each member has its own. Both work on the event loop and leave all that blocks to threads; what they do
follows from `serving.control.tiers`, and the tiers are `kv.store`'s.
"""
