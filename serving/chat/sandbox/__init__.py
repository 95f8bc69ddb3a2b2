"""Chat templates are programs: what they may do, and how much of it. Begin with `environment`."""
