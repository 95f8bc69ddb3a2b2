"""Generated conversations in which tools are called, and the tasks that the evaluation asks.

Conversations without tools belong to the folder above. The tools of the demo belong to `experiments.demo.toolbox`.
Begin with `tools`; `tool_library` lists the functions.
"""
