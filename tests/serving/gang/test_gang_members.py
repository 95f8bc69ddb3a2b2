"""What the members of a gang must have alike, and what each may have of its own."""

import pytest

from moonshard.serving.config.reading import load_config
from moonshard.serving.gang.members import made_of
from tests.serving.gateway.conftest import FIXTURE


def made(*overrides: str) -> dict[str, str]:
    return made_of(load_config(None, [f"model.path={FIXTURE}", "mode=aggregated", *overrides]), "both")


@pytest.mark.parametrize(
    "override",
    [
        "worker.host=10.0.0.2",
        "worker.port=1234",
        'worker.gateways=["127.0.0.1:50052"]',
        "worker.announced_host=member-1",
        "decode.port=1",
    ],
)
def test_where_a_member_is_and_whom_its_leader_tells_is_its_own(override: str):
    assert made(override) == made()


def test_what_it_serves_is_not():
    assert made("decode.max_slots=3")["configuration"] != made()["configuration"]
