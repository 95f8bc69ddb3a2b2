"""Where the installed `moonshard` begins: Ctrl-C ends it quietly from here on, while it is still importing too."""


def main() -> int:
    """The exit code; 130 for Ctrl-C."""
    try:
        from moonshard.serving.cli import main as command_line

        return command_line()
    except KeyboardInterrupt:
        return 130
