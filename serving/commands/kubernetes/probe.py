"""`moonshard probe`."""

import sys
from typing import Annotated

import tyro

from moonshard.serving.commands.options import Configured

TIMEOUT_S = 4.0


def probe(address: Annotated[str, tyro.conf.Positional], options: Configured) -> int:
    """Ask a worker or a gateway whether it serves, by gRPC's health service: the exit code is 0 if so, else 1.

    Args:
        address: host:port; with [tls] in the configuration, a host that its certificate names.
    """
    from moonshard.rpc.client import Client
    from moonshard.rpc.status import RequestError
    from moonshard.serving.config.tls import link_credentials

    with Client(address, credentials=link_credentials(options.load()), timeout_s=TIMEOUT_S) as client:
        try:
            answer = "SERVING" if client.health() else "NOT_SERVING"
        except RequestError as error:
            answer = str(error)
    sys.stdout.write(f"{answer}\n")
    return 0 if answer == "SERVING" else 1
