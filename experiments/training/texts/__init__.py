"""What the embedded model learns from. Begin with `corpus`."""
