"""What all measuring shares: fields of files, machines, intervals, signals. Imports no other folder of experiments.

What only one command needs belongs to that command's folder. Starting servers belongs to `common.running`.
Begin with `fields` (how an options table is read) or `intervals` (how figures get theirs).
"""
