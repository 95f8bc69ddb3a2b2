"""What meshes cost: planning the way between two, collectives, stages without work, and what of a handoff is exposed.

All devices are virtual ones of the CPU, so times on them say nothing of other hardware. Each question is asked in a
process of its own, one after another: `meshes.device`, and for handoffs a deployment.
"""

from collections.abc import Mapping

from moonshard.experiments.bench.meshes.device import MeshJob, Question
from moonshard.experiments.bench.meshes.handoff import measure_mesh_handoffs
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.common.running.own_process import ask
from moonshard.serving.config.keys import Config
from moonshard.serving.config.reading import as_overrides

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # beside it only flags: XLA ignores what follows any other word


def measure_meshes(config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    """Asks every question. CalledProcessError where its process fails, ServerFailed where a deployment does."""
    return [
        *_ask("reshard", config, plan, environment),
        *_ask("collectives", config, plan, environment),
        *_ask("bubble", config, plan, with_one_thread(environment)),
        *measure_mesh_handoffs(config, plan, environment),
    ]


def with_one_thread(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that must not split an operation over threads."""
    return {**environment, "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()}


def _ask(question: Question, config: Config, plan: Plan, environment: Mapping[str, str]) -> list[Measurement]:
    job = MeshJob(overrides=tuple(as_overrides(config)), plan=plan, question=question)
    return ask("experiments.bench.meshes.device", job, list[Measurement], environment)
