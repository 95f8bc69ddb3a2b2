"""`moonshard eval`: held-out questions and how they were answered. Begin with `command`."""
