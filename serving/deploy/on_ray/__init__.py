"""Workers' processes on the nodes of a Ray cluster: where they run is Ray's to say, all else stays the supervisor's.

Of Ray only placement groups and actors are used: an actor starts the same command as `moonshard serve` does here, and
passes on what that says. The driver (`driver`) is a process of its own, since Ray ends the process that drives it where
it loses its cluster, and may wait for one for minutes. Begin with `launcher`.
"""
