"""`moonshard bench`: the device side and the whole stack beside peers and limits. Begin with `command`."""
