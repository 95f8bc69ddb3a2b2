"""The subcommands of `moonshard`, a file each, which `serving.cli` finds. They parse, check, start, and say what went
wrong.

A command of an experiment belongs in `experiments`, which registers it as an entry point. What several commands check
before they start is in `checks`, options that they share in `options`. `processes` has those that run one process of a
deployment, `kubernetes` those for a deployment in a cluster. Begin with `serve`.
"""
