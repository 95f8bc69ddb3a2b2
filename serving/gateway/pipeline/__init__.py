"""From a checked request to a stream of events, whichever front it came through. Begin with `generation`."""
