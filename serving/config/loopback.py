"""Which names mean this machine and no other, without asking a resolver."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Only addresses, and the one name that RFC 6761 reserves."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
