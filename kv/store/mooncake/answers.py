"""Whether a server is there and well, asked without its protocol."""

from moonshard.kv.mooncake import await_answer


def answers(address: str, *, timeout_s: float) -> bool:
    """Whether a server closes a connection on which nothing was sent: one that is stopped or busy never does."""
    try:
        await_answer(address, timeout_s)
    except OSError:
        return False
    return True


def client_socket(port: int) -> str:
    """The name of the socket, in Linux's abstract namespace, by which a client at that port takes workers' memory."""
    return f"@mooncake_client_{port}.sock"
