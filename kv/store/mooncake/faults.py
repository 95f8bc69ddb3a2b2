"""What can be wrong with Mooncake Store itself, and is no miss."""


class StoreUnavailable(Exception):
    """What the store needs is not installed, or one of its processes does not start, or has ended."""
