"""The exposed part of a handoff between workers on different meshes, as `bench.serving.handoff` measures it."""

from collections.abc import Mapping
from dataclasses import replace

from moonshard.experiments.bench.meshes.tables import MESH_PAIRS, MeshPair, of_pair
from moonshard.experiments.bench.serving.handoff import measure_handoffs
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.server import serving
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides
from moonshard.sharding.rules import PREFILL


def measure_mesh_handoffs(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Measures one pair of meshes after another. ServerFailed where a deployment does not start."""
    lengths = replace(plan, handoff_tokens=plan.mesh_handoff_tokens, handoff_repeats=plan.mesh_handoff_repeats)
    found: list[Measurement] = []
    for pair in MESH_PAIRS:
        with serving(as_overrides(on_pair(config, pair)), environment) as server:
            found += [
                replace(one, level="meshes", name=of_pair(one.name, pair.name))
                for one in measure_handoffs(server, lengths)
            ]
    return found


def on_pair(config: Config, pair: MeshPair) -> Config:
    """The configuration with one prefill and one decode worker on these meshes."""
    return replace(
        config,
        mode="disaggregated",
        prefill=replace(config.prefill, replicas=1, mesh=pair.prefill, rules=PREFILL),
        decode=replace(config.decode, replicas=1, mesh=pair.decode, rules=pair.decode_rules),
    )
