"""The workers as a gateway sees them: links, sessions, what they know. Begin with `pool`."""
