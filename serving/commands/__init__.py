"""The subcommands of `moonshard`, a file each; `cli` finds them. They parse, check, start, and say what went wrong."""
