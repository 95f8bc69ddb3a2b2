"""What a supervisor says of where workers are, a gateway follows whose workers are listed, and no other."""

import os

from moonshard.serving.config.keys import GatewayConfig
from moonshard.serving.deploy.status_pipe import StatusWriter
from moonshard.serving.gateway.process import following_orders
from tests.serving.gateway.workers.fleet import until
from tests.serving.gateway.workers.registering import registry_over
from tests.serving.gateway.workers.test_gateway_pool import a_decode, a_prefill, pool_over

ELSEWHERE = "127.0.0.1:1"


async def test_a_gateway_whose_workers_are_listed_follows_them():
    read_end, write_end = os.pipe()
    async with pool_over(a_prefill(), a_decode()) as pool, following_orders(GatewayConfig(), read_end, pool):
        stays = pool.links[1].address
        StatusWriter(write_end)("workers", {"addresses": [ELSEWHERE, stays]})
        await until(lambda: [link.address for link in pool.links] == [ELSEWHERE, stays])
        os.close(write_end)


async def test_of_workers_that_register_nobody_else_says_where_they_are():
    read_end, write_end = os.pipe()
    config = GatewayConfig(registry="grpc")
    async with registry_over() as (pool, _):
        pool.call("127.0.0.1:2")  # as one that has registered, and that no supervisor knows
        async with following_orders(config, read_end, pool):
            tell = StatusWriter(write_end)
            tell("workers", {"addresses": [ELSEWHERE]})
            os.close(write_end)
            await until(lambda: not _is_open(read_end))  # all that was said has been heard
        assert [link.address for link in pool.links] == ["127.0.0.1:2"]


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


async def test_without_a_supervisor_there_is_nothing_to_follow():
    async with pool_over(a_prefill()) as pool, following_orders(GatewayConfig(), None, pool):
        assert len(pool.links) == 1
