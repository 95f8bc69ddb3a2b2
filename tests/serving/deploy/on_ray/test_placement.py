"""What processes take of a cluster, how close a gang must be, and what is said of a cluster that lacks something."""

import pytest

from moonshard.serving.deploy.on_ray.placement import (
    Strategy,
    WorkerNeeds,
    lacking,
    no_room,
    process_bundle,
    strategy_of,
)

HOST = {"CPU": 16.0, "GPU": 8.0, "memory": 1e12, "node:10.0.0.1": 1.0}


def gang(num_processes: int, num_gpus: float) -> WorkerNeeds:
    return WorkerNeeds("worker 0", num_processes, {"CPU": 1, "GPU": num_gpus})


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (gang(1, 8), "STRICT_PACK"),
        (gang(2, 4), "STRICT_PACK"),  # both within a host
        (gang(2, 8), "SPREAD"),  # a host each
        (gang(4, 4), "SPREAD"),
    ],
)
def test_a_gang_is_kept_within_a_host_where_one_has_enough_and_is_else_spread(needs: WorkerNeeds, expected: Strategy):
    assert strategy_of(needs, [{"CPU": 64.0}, HOST, HOST]) == expected


def test_a_device_costs_a_cpu_or_one_of_the_named_resource_and_a_cpu_for_the_process():
    assert process_bundle(4, None) == process_bundle(4, "CPU") == {"CPU": 4}
    assert process_bundle(4, "GPU") == {"CPU": 1, "GPU": 4}


def test_a_cluster_lacks_nothing_that_it_could_have_if_nothing_else_ran():
    assert lacking([gang(2, 8), gang(2, 4)], [HOST] * 3) == []


def test_a_process_that_fits_on_no_node_is_told_with_the_most_that_one_has():
    needs = WorkerNeeds("decode 1", 1, {"CPU": 1, "GPU": 8})
    nodes = [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 64.0}]
    assert lacking([needs], nodes) == [
        "decode 1 needs 1 CPU and 8 GPU on one node; the most that one has is 64 CPU and 4 GPU"
    ]
    assert lacking([needs], nodes[:1]) == [
        "decode 1 needs 1 CPU and 8 GPU on one node; the only one has 4 CPU and 4 GPU"
    ]
    assert lacking([needs], []) == ["decode 1 needs 1 CPU and 8 GPU on one node; there is no node"]


def test_resources_that_are_on_different_nodes_are_not_added_up_for_one_process():
    assert lacking([gang(1, 8)], [{"CPU": 1.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 4.0}])
    assert lacking([WorkerNeeds("worker 0", 1, {"CPU": 1, "GPU": 1})], [{"CPU": 1.0}, {"GPU": 1.0}])


def test_workers_that_are_too_many_together_are_told_with_what_there_is_in_all():
    assert lacking([gang(2, 8), gang(2, 4)], [HOST, HOST]) == ["the workers need 24 GPU in all; the cluster has 16 GPU"]


def test_what_others_use_is_told_as_such():
    told = no_room(gang(2, 4), "STRICT_PACK", [HOST, HOST], {"CPU": 30.0, "GPU": 6.0})
    assert told == (
        "worker 0 needs 2 CPU and 8 GPU on one node; of 32 CPU on 2 nodes 30 are free; of 16 GPU on 2 nodes 6 are free"
    )
    assert "in 2 equal parts" in no_room(gang(2, 8), "SPREAD", [HOST, HOST], {})
