"""`moonshard experts`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.deploy.startup import prepare_jax
from moonshard.sharding.shape import MeshShape

if TYPE_CHECKING:
    import numpy as np


def experts(
    model: Path,
    text: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")],
    devices: int = 8,
    redundant: int = 0,
) -> int:
    """Measure how much a text uses each routed expert, for placing experts on devices by their load.

    The file that it writes is for `decode.expert_loads` and `prefill.expert_loads`. It prints how unevenly experts and
    devices are loaded, and how evenly devices would be with experts placed by these loads.

    Args:
        model: the checkpoint's folder.
        text: a file of UTF-8 text, of the kind that will be served.
        out: the JSON file to write.
        devices: how many devices share the experts, for the printed table.
        redundant: further copies of experts in each layer, over all devices, for the printed table.
    """
    tokens = _tokens_of(model, text)
    prepare_jax(MeshShape())
    from moonshard.models.experts.loads import measure, write_loads
    from moonshard.models.score import Scorer

    scorer = Scorer(model)
    _check_sizes(scorer.config.n_routed_experts, devices, redundant)
    loads = measure(scorer, tokens, _show_progress)
    try:
        write_loads(out, loads, scorer.fingerprint)
    except OSError as error:
        raise ConfigError([f"--out {out}: {error.strerror}"]) from error
    sys.stdout.write(_table(loads, devices, redundant))
    return 0


def _check_sizes(num_experts: int, num_devices: int, num_redundant: int) -> None:
    if num_devices < 1 or num_experts % num_devices:
        raise ConfigError([f"--devices {num_devices}: does not divide {num_experts} experts"])
    if num_redundant < 0 or num_redundant % num_devices:
        raise ConfigError([f"--redundant {num_redundant}: {num_devices} devices cannot share them equally"])


def _tokens_of(model: Path, text: Path) -> list[int]:
    from moonshard.models.tokenizers.tokenizer import load_tokenizer

    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--text {text}: {error}"]) from error
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ConfigError([f"--model {model}: there is no tokenizer in it"])
    tokens = tokenizer.encode(content)
    if not tokens:
        raise ConfigError([f"--text {text}: the file is empty"])
    return tokens


def _show_progress(done: int, total: int) -> None:
    sys.stderr.write(f"\r{done:,} of {total:,} tokens{'' if done < total else chr(10)}")
    sys.stderr.flush()


def _table(loads: "np.ndarray", num_devices: int, num_redundant: int) -> str:
    """For each layer the load of the busiest expert, and of the busiest device with experts in order and as placed."""
    import numpy as np

    from moonshard.sharding.experts import place_experts

    num_experts = loads.shape[1]
    placed = place_experts(loads, num_experts + num_redundant, num_devices)
    at_places = np.take_along_axis(loads / placed.num_copies, placed.expert_of, axis=1)
    lines = ["max / mean of the load, by MoE layer", "layer  expert  device  device, placed"]
    for layer, (of_experts, of_places) in enumerate(zip(loads, at_places, strict=True)):
        expert, device = _ratio(of_experts, num_experts), _ratio(of_experts, num_devices)
        lines.append(f"{layer:5}  {expert:6.2f}  {device:6.2f}  {_ratio(of_places, num_devices):14.2f}")
    return "\n".join(lines) + "\n"


def _ratio(loads: "np.ndarray", num_parts: int) -> float:
    """The largest over the mean load of parts that have equally many each."""
    parts = loads.reshape(num_parts, -1).sum(axis=1)
    return float(parts.max() / parts.mean())
