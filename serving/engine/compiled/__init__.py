"""Programs before they run: traced, lowered, compiled, kept on disk and found again. Begin with `preparation`."""
