"""Tries sizes in a process of its own: `python -m moonshard.experiments.bench.sizes.device`, JSON in, JSON out.

Reads a `SizesJob` on stdin; on stdout what was tried, on stderr how far it is.
"""

import sys

import msgspec

from moonshard.experiments.bench.sizes.record import SizesJob
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.startup import prepare_jax


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SizesJob)
    config = load_config(None, job.overrides)
    prepare_jax(config.decode.mesh)
    from moonshard.experiments.bench.sizes.candidates import try_sizes  # imports jax, which has been told all by now

    found = try_sizes(config, job, lambda name: print(f"sizes: {name}", file=sys.stderr))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
