"""The ports at which a process listens, as Linux reports them: Mooncake does not tell which ones it opened.

On other systems nothing is found; Mooncake runs on Linux only.
"""

from pathlib import Path

_LISTENING = "0A"  # a socket's state; source: proc(5), /proc/net/tcp


def listening_ports(pid: int | str = "self") -> frozenset[int]:
    """TCP, over IPv4 and IPv6."""
    folder = Path(f"/proc/{pid}")
    try:
        own = {link for entry in (folder / "fd").iterdir() if (link := _target(entry)).startswith("socket:[")}
        lines = [line for name in ("tcp", "tcp6") for line in _lines(folder / "net" / name)]
    except OSError:
        return frozenset()
    rows = (line.split() for line in lines)
    found = ((row[1], row[9]) for row in rows if row[3] == _LISTENING)
    return frozenset(int(address.rpartition(":")[2], 16) for address, inode in found if f"socket:[{inode}]" in own)


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed since
        return ""


def _lines(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.exists() else []
