"""How an address is written: `host:port`, and an IPv6 host in brackets."""


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
