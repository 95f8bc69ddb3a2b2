"""Connections of the HTTP front: how long they may wait, and what HTTP/1.0 and 1.1 ask. Begin with `protocol`."""
