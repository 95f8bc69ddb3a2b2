"""Processes as such: how they start and end, their children, status lines, terminal and heap.

It knows nothing of what is computed. What a process serves belongs in `serving.worker`, `serving.gateway` and
`serving.store`, the command lines in `serving.commands`. What starts them in a cluster is described by `kubernetes`;
where Ray places them, `on_ray` starts them.
Begin with `startup` for one process, with `children.supervisor` for a deployment of several.
"""
