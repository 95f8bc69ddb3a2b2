"""`moonshard budget`."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from moonshard.models.machines import MACHINES
from moonshard.serving.config.keys import ConfigError
from moonshard.sharding.budget import Budget, all_meshes, ranked
from moonshard.sharding.budget import budget as budget_of
from moonshard.sharding.rules import DECODE, PREFILL, Rules, context_parallel
from moonshard.sharding.shape import MeshShape

if TYPE_CHECKING:  # jax takes a second to load, and a wrong option should not wait for it
    from moonshard.models.formats.sizes import Held
    from moonshard.models.model import Model
    from moonshard.models.spec import WeightFormat

GIB, MIB = 2**30, 2**20
DEVICES = {  # MiB, as nvidia-smi tells them
    "a100-40gb": 40_960,
    "a100-80gb": 81_920,
    "h100-80gb": 81_559,
    "h200-141gb": 143_771,
    "l40s-48gb": 46_068,
}
MAX_DEVICES = 1024


def budget(
    model: str,
    device: Annotated[str, tyro.conf.arg(metavar="NAME:COUNT")],
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "",
    role: Literal["prefill", "decode"] = "decode",
    weights: Literal["native", "bf16", "fp8", "int8", "int4-experts"] = "native",
    chunk_tokens: int = MACHINES["gpu"].chunk_tokens,
    max_slots: int = 64,
    lower: bool = False,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
) -> int:
    """Compute what a mesh leaves for the KV cache: bytes per device and unique tokens, from shapes alone.

    Args:
        model: a known model's name, or a Hugging Face folder, of which config.json and the headers of weights are read.
        device: what there is, for example h100-80gb:8, or 64gib:4 for four devices of 64 GiB.
        mesh: one mesh, for example expert=2,tensor=4. Without it all meshes of that many devices, ranked.
        role: whose table of rules.
        weights: their format in memory; native: a known model's on the hub, a folder's own, else its config.json's.
        chunk_tokens: of a prefill step, per partition.
        max_slots: sequences that a worker decodes at once, over all partitions.
        lower: also lower the step that serves, with weights in bf16, for as many virtual CPU devices as the mesh has,
            compile it if that takes less than ten minutes, and compare its bytes with the budget's. Needs --mesh.
        json_file: also write the figures here.
    """
    device_bytes, num_devices = _parse_device(device)
    if lower and not mesh:
        raise ConfigError(["--lower: lowers for one mesh; name it with --mesh"])
    shapes = [_parse_mesh(mesh, num_devices)] if mesh else list(all_meshes(num_devices))
    _check_sizes(chunk_tokens, max_slots)
    from moonshard.models.spec import StepSize

    config_json, served, native = _find_model(model)
    whole = served.pieces(native if weights == "native" else weights)
    named = weights if weights != "native" else "as stored" if callable(native) else native

    def workspace(mesh: MeshShape, rules: Rules) -> int:
        rows = max_slots // mesh.num_partitions or 1
        step = StepSize(num_tokens=chunk_tokens if role == "prefill" else rows, num_logits=rows)
        return served.workspace_bytes(step, mesh, rules)

    rules = PREFILL if role == "prefill" else DECODE
    longest = served.config.max_position_embeddings
    found = ranked([budget_of(whole, shape, rules, device_bytes, workspace, longest, chunk_tokens) for shape in shapes])
    parallel = context_parallel(rules)
    split = [budget_of(whole, each.mesh, parallel, device_bytes, workspace, longest, chunk_tokens) for each in found]
    title = f"{model}: {whole.num_bytes / GIB:.1f} GiB of weights ({named}) on {device}, rules for {role}"
    sys.stdout.write(f"{title}\n{_table(found, split)}\n")
    records = [_record(*pair) for pair in zip(found, split, strict=True)]
    exit_code = 0
    if lower:
        if not found[0].stages:
            raise ConfigError([f"--lower: {found[0].reason}"])
        from moonshard.serving.commands.checks.lowering import lower_and_tell
        from moonshard.serving.engine.compiled.lowering_process import LoweringJob

        job = LoweringJob(
            config_json=dict(config_json), mesh=shapes[0], role=role, chunk_tokens=chunk_tokens, max_slots=max_slots
        )
        exit_code, reports = lower_and_tell(job)
        records[0]["lowered"] = [asdict(report) for report in reports]
    if json_file is not None:
        _write(json_file, records)
    return exit_code


def _parse_device(text: str) -> tuple[int, int]:
    name, _, count = text.partition(":")
    known = DEVICES.get(name, 0) * MIB or _gib(name)
    if known is None:
        raise ConfigError([f"--device {text}: unknown device {name!r} (known: {', '.join(DEVICES)}, or 64gib)"])
    if not count.isdecimal() or not 1 <= int(count) <= MAX_DEVICES:
        raise ConfigError([f"--device {text}: expected a number of devices from 1 to {MAX_DEVICES} after the colon"])
    return known, int(count)


def _gib(name: str) -> int | None:
    number = name.removesuffix("gib")
    try:
        size = float(number) if number != name else 0.0
    except ValueError:
        return None
    return int(size * GIB) if 0 < size < 1e6 else None


def _parse_mesh(text: str, num_devices: int) -> MeshShape:
    axes = [field.name for field in fields(MeshShape)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if axis not in axes or not size.isdecimal() or int(size) < 1:
            raise ConfigError([f"--mesh {part.strip()}: expected axis=size with an axis of {', '.join(axes)}"])
        if axis in sizes:
            raise ConfigError([f"--mesh {text}: names {axis} twice"])
        sizes[axis] = int(size)
    mesh = MeshShape(**sizes)
    if mesh.num_devices != num_devices:
        raise ConfigError([f"--mesh {text}: has {mesh.num_devices} devices, --device names {num_devices}"])
    return mesh


def _check_sizes(chunk_tokens: int, max_slots: int) -> None:
    for option, value in (("--chunk-tokens", chunk_tokens), ("--max-slots", max_slots)):
        if value < 1:
            raise ConfigError([f"{option} {value}: expected at least 1"])


def _find_model(name: str) -> "tuple[Mapping[str, Any], Model, WeightFormat | Held]":
    """The config.json of a known model or of a folder, its model, and what its weights are held in."""
    from moonshard.models.folder.checkpoint import INDEX, WEIGHTS
    from moonshard.models.folder.json_file import read_json_object
    from moonshard.models.folder.known import KNOWN
    from moonshard.models.folder.quantization import format_meant
    from moonshard.models.formats.sizes import held_as_stored
    from moonshard.models.registry import model_of, open_model
    from moonshard.models.spec import ModelError
    from moonshard.models.weights import check_shapes

    if (known := KNOWN.get(name)) is not None:
        return known.config, model_of(known.config), known.native
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError([f"--model {name}: neither a folder nor a known model ({', '.join(KNOWN)})"])
    if any((folder / file).exists() for file in (WEIGHTS, INDEX)):
        checkpoint, found = open_model(folder)
        check_shapes(found.declare(), checkpoint)
        return checkpoint.config, found, held_as_stored(checkpoint)
    raw = read_json_object(folder / "config.json", ModelError)
    try:
        return raw, model_of(raw), format_meant(raw)
    except ModelError as error:
        raise ModelError(f"{folder}/{error}") from error


def _table(found: Sequence[Budget], split: Sequence[Budget]) -> str:
    """One line per mesh, totals over all devices unless it says otherwise; then why those that do not fit do not."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("mesh", no_wrap=True)
    names = ("weights GiB a device", "activations GiB a device", "repeated GiB", "KV GiB", "tokens")
    for name in (*names, "tokens, context parallel", "layers"):
        table.add_column(name, justify="right", no_wrap=True)
    for whole, parted in zip(found, split, strict=True):
        if not whole.stages:
            continue
        table.add_row(
            str(whole.mesh),
            f"{max(stage.weight_bytes for stage in whole.stages) / GIB:.1f}",
            f"{max(stage.workspace_bytes for stage in whole.stages) / GIB:.2f}",
            f"{whole.repeated_bytes / GIB:.1f}",
            f"{whole.headroom_bytes / GIB:.1f}",
            f"{whole.num_tokens:,}" if whole.reason is None else "does not fit",
            f"{parted.num_tokens:,}" if parted.reason is None else "",
            "+".join(str(stage.num_layers) for stage in whole.stages),
        )
    refused = [f"{each.mesh}: {each.reason}" for each in found if each.reason is not None]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return "\n".join([capture.get().rstrip(), *refused])


def _record(whole: Budget, parted: Budget) -> dict[str, object]:
    return {
        "mesh": asdict(whole.mesh),
        "reason": whole.reason,
        "stages": [asdict(stage) for stage in whole.stages],
        "repeated_bytes": whole.repeated_bytes,
        "headroom_bytes": whole.headroom_bytes,
        "num_tokens": whole.num_tokens,
        "num_tokens_context_parallel": parted.num_tokens,
    }


def _write(path: Path, records: Sequence[dict[str, object]]) -> None:
    try:
        path.write_text(json.dumps(records, indent=1) + "\n")
    except OSError as error:
        raise ConfigError([f"--json {path}: {error.strerror}"]) from error
