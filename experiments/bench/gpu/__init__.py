"""One card: is it right, and how close to what the card can. Begin with `command`."""
