"""Whether a server is there and well, and a client of Mooncake Store, asked without its protocol."""

from pathlib import Path

from moonshard.kv.mooncake import await_answer

SOCKETS = Path("/proc/net/unix")  # of this network namespace; source: proc_net_unix(5)


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


def is_client_here(address: str) -> bool:
    """Whether somebody on this machine has the socket of a client at that port. Nothing is sent there."""
    name = client_socket(int(address.rpartition(":")[2]))
    return any(line.endswith(f" @{name}") for line in SOCKETS.read_text().splitlines())  # @: the first byte, which is 0
