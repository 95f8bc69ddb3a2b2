"""Which requests a worker's next step computes, and with which blocks. Begin with `scheduler`."""
