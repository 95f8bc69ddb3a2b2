"""Profiles steps in a process of its own: `python -m moonshard.experiments.bench.profile.device`, JSON in, JSON out.

Reads a `ProfileJob` on stdin; on stdout the profile of each step.
"""

import sys

import msgspec

from moonshard.experiments.bench.profile.record import ProfileJob
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import prepare_jax


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileJob)
    config = load_config(None, job.overrides)
    prepare_jax(config.decode.mesh)
    from moonshard.experiments.bench.profile.steps import profile_steps  # imports jax, which has been told all by now

    sys.stdout.buffer.write(msgspec.json.encode(profile_steps(config, job)))


if __name__ == "__main__":
    main()
