"""`moonshard router-replay`: the router alone over a trace. Begin with `replay`."""
