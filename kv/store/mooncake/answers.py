"""Whether a server is there and well, asked without its protocol."""

import socket


def answers(address: str, *, timeout_s: float) -> bool:
    """Whether a server closes a connection on which nothing was sent: one that is stopped or busy never does.

    ValueError where the address is not host:port.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b""
    except OSError:
        return False
