"""How an address is written: `host:port`, and an IPv6 host in brackets."""


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether the text is `host:port`, with a port that can be called; a URL is none."""
    host, _, port = text.rpartition(":")
    is_host = bool(host) and not set(host) & set("/@?# ")
    return is_host and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535
