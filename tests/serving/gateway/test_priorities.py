"""A priority reaches the workers, whichever API it came by."""

import httpx
import pytest

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import InvalidArgument
from tests.serving.gateway.fake_worker import FakeWorker

SAID = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 1},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": SAID, "max_tokens": 1},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_priority_reaches_the_worker_and_a_wrong_one_is_refused_by_name(
    route: str, http: httpx.AsyncClient, worker: FakeWorker
):
    for given in (-7, 2**31 - 1, 3.0, None):
        response = await http.post(route, json=ROUTES[route] | {"priority": given})
        assert response.status_code == 200, response.text
    assert (await http.post(route, json=ROUTES[route])).status_code == 200
    assert [run.priority for run in worker.runs] == [-7, 2**31 - 1, 3, 0, 0]
    for wrong in (2**31, -(2**31), 0.5, "first"):
        response = await http.post(route, json=ROUTES[route] | {"priority": wrong})
        assert (response.status_code, "priority" in response.text) == (400, True)
    assert len(worker.runs) == 5


async def test_a_priority_reaches_the_worker_over_grpc(grpc_client: AsyncClient, worker: FakeWorker):
    await grpc_client.generate([1, 2], max_tokens=1, priority=-7)
    assert [run.priority for run in worker.runs] == [-7]
    with pytest.raises(InvalidArgument, match="priority"):
        await grpc_client.generate([1, 2], max_tokens=1, priority=-(2**31))
