"""`moonshard worker`, `prefill` and `decode`: one worker as a process."""

import logging
from typing import Annotated

import tyro

from moonshard.serving.commands.checks.ports import check_worker_port_is_free
from moonshard.serving.commands.checks.tiers import check_tiers_fit
from moonshard.serving.commands.options import ConfigOptions, Configured, StatusFd
from moonshard.serving.config.faults import announced_faults, has_kv_stream, kv_plane_note
from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, command_of, mesh_of, port_key, roles_of
from moonshard.serving.deploy.startup import ProcessStart, RunProcess, end_process, prepare_worker, run_process
from moonshard.serving.deploy.status_pipe import Status
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.gang.members import Member, member_of

logger = logging.getLogger(__name__)


MemberIndex = Annotated[int, tyro.conf.arg(metavar="N", help="Which process of the worker this is; 0 leads.")]
Leader = Annotated[
    str | None,
    tyro.conf.arg(metavar="HOST:PORT", help="Where member 0 listens; for the others.", help_behavior_hint=""),
]


def worker(options: Configured, member: MemberIndex = 0, leader: Leader = None, status_fd: StatusFd = None) -> int:
    """Run only one worker of mode = "aggregated", at worker.host and worker.port: the model, for prefill and decode."""
    return start_worker(options, "both", status_fd, member, leader)


def prefill(options: Configured, member: MemberIndex = 0, leader: Leader = None, status_fd: StatusFd = None) -> int:
    """Run only one prefill worker, at worker.host and prefill.port: it hands its KV over to decode workers."""
    return start_worker(options, "prefill", status_fd, member, leader)


def decode(options: Configured, member: MemberIndex = 0, leader: Leader = None, status_fd: StatusFd = None) -> int:
    """Run only one decode worker, at worker.host and decode.port: it goes on from the KV of prefill workers."""
    return start_worker(options, "decode", status_fd, member, leader)


def start_worker(
    options: ConfigOptions, role: WorkerRole, status_fd: int | None, index: int = 0, leader: str | None = None
) -> int:
    """Run it to its end; the exit code. ConfigError for a role that the mode does not have, or a port in use."""
    timings = Timings()
    timings.note("interpreter", 0.0)
    with timings.phase("configuration"):
        config = options.load()
        _check_role(config, role)
        if faults := announced_faults(config.worker):
            raise ConfigError(faults)
        member = member_of(config, role, index, leader)
        check_worker_port_is_free(config, role, listens=member.leads or has_kv_stream(config))
        if status_fd is None:  # else a supervisor has asked, and this may be one that comes back
            check_tiers_fit(config, [role], is_one_process=True)
    start = ProcessStart(timings=timings, programs=prepare_worker(mesh_of(config, role), member.num_members))
    if note := kv_plane_note(config):
        logger.warning(note)
    code = run_process(lambda: _load(role, member), config, status_fd, start)
    return end_process(code, at_once=member.num_members > 1 or config.kv.store.is_shared)


def _check_role(config: Config, role: WorkerRole) -> None:
    """A gateway of the other mode would not look for it, and the rules of the KV plane hold in one mode only."""
    if role not in roles_of(config):
        commands = " and ".join(f"`moonshard {command_of(known)}`" for known in roles_of(config))
        other = "aggregated" if role == "both" else "disaggregated"
        fault = f"`moonshard {command_of(role)}` is for {other}; the workers of {config.mode} are {commands}"
        raise ConfigError([f"mode: {fault}"])


def _load(role: WorkerRole, member: Member) -> RunProcess:
    from moonshard.rpc.server.server import PortInUse
    from moonshard.serving.worker.process import run_worker

    async def run(config: Config, *, status: Status, start: ProcessStart) -> int:
        if not member.leads:
            from moonshard.serving.gang.follower import run_follower

            return await run_follower(config, role, member, status=status, start=start)
        try:
            return await run_worker(config, role, status=status, start=start)
        except PortInUse as error:
            raise ConfigError([f"{port_key(role)}: {error}"]) from error

    return run
