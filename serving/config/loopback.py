"""Which names mean this machine and no other, and which all of its addresses, without asking a resolver."""

import ipaddress

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # every address of this machine, by which nobody reaches it


def is_loopback(host: str) -> bool:
    """True only for loopback's addresses, and for the one name that RFC 6761 reserves."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
