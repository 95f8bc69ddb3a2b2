"""What the command line says of peers before anything is measured."""

import pytest

from moonshard.experiments.bench import command
from moonshard.experiments.bench.command import bench


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was measured or written")

    for name in ("run_bench", "measure_beside", "measure_profile"):
        monkeypatch.setattr(command, name, never)
    monkeypatch.setattr(command.proportions, "once", never)


@pytest.mark.parametrize(
    ("peer", "only", "said"),
    [
        (("llama",), "peers", "--peer llama: expected NAME=URL"),
        (("moonshard=http://h",), "peers", "--peer moonshard=http://h: there are figures of moonshard already"),
        (("a=http://h",), "steps", "--peer: only the part peers asks them"),
        ((), "pears", "--only: there is no part pears"),
    ],
)
def test_a_wrong_peer_is_named_and_nothing_runs(capsys, peer, only, said):
    assert bench(peer=peer, only=only) == 2
    assert said in capsys.readouterr().err
