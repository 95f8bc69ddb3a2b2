"""Which workers an attempt at a request is sent to, whether it is admitted, and what follows when it fails. Begin with
`dispatcher`. How one worker is chosen among several is `routing`'s."""
