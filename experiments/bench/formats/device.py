"""Times formats in a process of its own: `python -m moonshard.experiments.bench.formats.device`, JSON in, JSON out.

Reads a `FormatsJob` on stdin; on stdout the times of each arm.
"""

import sys

import msgspec

from moonshard.experiments.bench.formats.record import FormatsJob
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import prepare_jax


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=FormatsJob)
    config = load_config(None, job.overrides)
    prepare_jax(config.decode.mesh)
    from moonshard.experiments.bench.formats.steps import time_formats  # imports jax, which has been told all by now

    sys.stdout.buffer.write(msgspec.json.encode(time_formats(config, job)))


if __name__ == "__main__":
    main()
