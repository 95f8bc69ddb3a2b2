"""The training itself. Begin with `train` and `recipe`."""
