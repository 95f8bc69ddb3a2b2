"""What is measured of meshes: on which of them, what each figure is called, its bar, and the four tables.

Imports no jax: measuring is done in processes of its own, and the command that prints the tables loads none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moonshard.experiments.bench.serving.handoff import COLUMNS as HANDOFF_COLUMNS
from moonshard.experiments.bench.serving.handoff import handoff_rows
from moonshard.experiments.common.grid import Grid, number, spread, verdict
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.sharding.rules import DECODE, PREFILL, DecodeRules, Rules
from moonshard.sharding.shape import MeshShape

BY_TOKENS = Rules(kv_tokens=("tensor",))

# ---- reshard

NUM_OWNERS = 8
NUM_LAYERS, NUM_FEATURES, BLOCK_SIZE, DTYPE = 61, 576, 64, "bfloat16"  # of Kimi K2's latent
NUM_BLOCKS = 64  # of a request of 4,096 tokens
PLAN_BAR_MS, EXPAND_BAR_MS = 2.0, 1.0
PLAN = "template of a pair"
ORDERS = ("scattered", "consecutive")
LAYOUTS: Mapping[str, tuple[MeshShape, Rules]] = {
    "tensor 8": (MeshShape(tensor=8), PREFILL),
    "tensor 8 by tokens": (MeshShape(tensor=8), BY_TOKENS),
    "pipe 8": (MeshShape(pipe=8), PREFILL),
    "pipe 2 x tensor 4": (MeshShape(tensor=4, pipe=2), PREFILL),
    "pipe 2 x tensor 4 by tokens": (MeshShape(tensor=4, pipe=2), BY_TOKENS),
}
LAYOUT_PAIRS = (
    ("tensor 8", "tensor 8"),
    ("tensor 8", "pipe 8"),
    ("tensor 8", "tensor 8 by tokens"),
    ("pipe 8", "tensor 8 by tokens"),
    ("pipe 2 x tensor 4", "tensor 8"),
    ("pipe 2 x tensor 4 by tokens", "tensor 8"),
    ("tensor 8 by tokens", "tensor 8 by tokens"),
    ("tensor 8 by tokens", "pipe 2 x tensor 4 by tokens"),
)
RESHARD_COLUMNS = (
    "8 owners to 8",
    f"{PLAN}, ms",
    *(f"expand, {order} blocks, ms" for order in ORDERS),
    *(f"transfers, {order}" for order in ORDERS),
    f"bars {PLAN_BAR_MS:g} and {EXPAND_BAR_MS:g} ms",
)


def pair_name(source: str, destination: str) -> str:
    return f"{source} to {destination}"


def plan_name(pair: str) -> str:
    return f"{PLAN}, {pair}"


def expand_name(order: str, pair: str) -> str:
    return f"expand, {order} blocks, {pair}"


def transfers_name(order: str, pair: str) -> str:
    return f"transfers, {order} blocks, {pair}"


def reshard_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each pair of layouts, medians."""
    del plan
    found = _found(measurements)
    rows = []
    for pair in (pair_name(*each) for each in LAYOUT_PAIRS):
        if template := found.get(plan_name(pair)):
            expands = [found[expand_name(order, pair)].median for order in ORDERS]
            transfers = [found[transfers_name(order, pair)].median for order in ORDERS]
            is_held = template.median < PLAN_BAR_MS and max(expands) < EXPAND_BAR_MS
            times = [number(value) for value in (template.median, *expands)]
            rows.append((pair, *times, *(f"{value:,.0f}" for value in transfers), verdict(is_held)))
    notes = (
        f"Reshard: blocks as Kimi K2 has them, {NUM_LAYERS} layers of {NUM_FEATURES} {DTYPE} for {BLOCK_SIZE} tokens; "
        f"{NUM_BLOCKS} blocks of a request of {NUM_BLOCKS * BLOCK_SIZE:,} tokens. A template is made anew each time, "
        "which a worker does once for a pair. Blocks are cut by layers, or by tokens where the name says so.",
    )
    return _grid("From the layout of one mesh to that of another", RESHARD_COLUMNS, rows, notes)


# ---- collectives

type Where = Literal["a dense layer", "a sparse layer", "a round of the exchange", "outside"]
WHERES: tuple[Where, ...] = ("a dense layer", "a sparse layer", "a round of the exchange", "outside")
ROLES = ("decode", "prefill")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
NUM_ALL_REDUCES = 2  # of a layer under tensor parallelism: one behind attention, one behind the experts
BAR = f"bar {NUM_ALL_REDUCES} all-reduces"
COLLECTIVE_COLUMNS = ("mesh", "step of", *(f"in {where}" for where in WHERES[:3]), "outside the layers", BAR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A mesh whose steps are counted. Without rules of its own, each role uses its default table."""

    name: str
    mesh: MeshShape
    rules: Rules | None = None
    has_bar: bool = False  # whether a layer of a decode step should have two all-reduces and nothing else


CASES = (
    Case(name="tensor 2", mesh=MeshShape(tensor=2), has_bar=True),
    Case(name="tensor 4", mesh=MeshShape(tensor=4), has_bar=True),
    Case(name="expert 4", mesh=MeshShape(expert=4)),
    Case(name="expert 2 x tensor 2, experts cut", mesh=MeshShape(expert=2, tensor=2), rules=PREFILL),
    Case(name="expert 2 x tensor 2, experts whole", mesh=MeshShape(expert=2, tensor=2), rules=DECODE),
    Case(name="tensor 2 by tokens", mesh=MeshShape(tensor=2), rules=DecodeRules(kv_tokens=("tensor",))),
    Case(name="data 2 x tensor 2", mesh=MeshShape(data=2, tensor=2)),
    Case(name="pipe 2", mesh=MeshShape(pipe=2)),
)


def collective_name(kind: str, where: Where, role: str, mesh: str) -> str:
    return f"{kind} in {where}, {role}, {mesh}"


def collectives_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each mesh and role; the cells name what there is."""
    del plan
    found = _found(measurements)
    rows = []
    for case in CASES:
        for role in ROLES:
            if collective_name(KINDS[0], WHERES[0], role, case.name) in found:
                counts = [_counts(found, where, role, case) for where in WHERES]
                said = verdict(_is_within_bar(counts)) if case.has_bar and role == "decode" else ""
                rows.append((case.name, role, *map(_cell, counts), said))
    notes = (
        "Collectives: from the compiled HLO of the largest step of each role; a layer's are counted once a layer, a "
        "round's once a round of the exchange of tokens between experts, of which there is one unless experts are "
        "very unevenly loaded; those outside once a step, over all stages. Activations go from stage to stage by a "
        "copy, which is none of them. A mesh whose name says nothing of rules has each role's own table.",
    )
    return _grid("Collectives of a step", COLLECTIVE_COLUMNS, rows, notes)


def _counts(found: Mapping[str, Measurement], where: Where, role: str, case: Case) -> dict[str, int]:
    return {kind: int(found[collective_name(kind, where, role, case.name)].median) for kind in KINDS}


def _is_within_bar(counts: Sequence[Mapping[str, int]]) -> bool:
    dense, sparse, rounds, _ = counts
    layers_are = (layer["all-reduce"] == sum(layer.values()) == NUM_ALL_REDUCES for layer in (dense, sparse))
    return all(layers_are) and not any(rounds.values())


def _cell(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


# ---- bubble

PIPES = (2, 4)
BUBBLE_COLUMNS = (
    "stages",
    "microbatches",
    "rows of a step",
    "busy with a step, by stage, ms",
    "a step every, ms",
    "bubble",
    "min to max",
    "at best",
    "n",
)


def bubble_name(num_stages: int, num_microbatches: int) -> str:
    return f"bubble, {num_stages} stages, {num_microbatches} microbatches"


def busy_name(stage: int, num_stages: int, num_microbatches: int) -> str:
    return f"busy with a step, stage {stage + 1} of {num_stages}, {num_microbatches} microbatches"


def step_name(num_stages: int, num_microbatches: int) -> str:
    return f"a step every, {num_stages} stages, {num_microbatches} microbatches"


def bubble(busy_ms: Sequence[float], step_ms: float) -> float:
    """The share of the time in which a stage has no work, mean over stages, where a step ends every `step_ms`.

    Below 0 where stages were slower alone than in the pipeline.
    """
    return 1 - sum(busy_ms) / (len(busy_ms) * step_ms)


def bubble_at_best(busy_ms: Sequence[float], num_microbatches: int) -> float:
    """The least idle share possible: a pipeline is as slow as its slowest stage, or as one microbatch's whole way."""
    return bubble(busy_ms, max(*busy_ms, sum(busy_ms) / num_microbatches))


def bubble_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """A row for each number of stages and microbatches, medians."""
    found = _found(measurements)
    rows = []
    for num_stages in PIPES:
        for num_microbatches in (1, num_stages):
            if share := found.get(bubble_name(num_stages, num_microbatches)):
                of_pipe = num_stages, num_microbatches
                busy_ms = [found[busy_name(stage, *of_pipe)].median for stage in range(num_stages)]
                rows.append(
                    (
                        str(num_stages),
                        str(num_microbatches),
                        str(plan.pipeline_rows // num_microbatches),
                        " + ".join(number(each) for each in busy_ms),
                        number(found[step_name(*of_pipe)].median),
                        f"{share.median:.3f}",
                        spread(share),
                        f"{bubble_at_best(busy_ms, num_microbatches):.3f}",
                        str(len(share.samples)),
                    )
                )
    notes = (
        f"Bubble: 1 - (busy time of all stages / stages x time), of decode steps over {plan.pipeline_rows} sequences "
        f"after {plan.pipeline_context:,} tokens; each stage a virtual device, XLA told to split no operation over "
        "threads. Busy is a stage running its program alone, again and again; the tokens' way back to the first stage "
        "counts as no work. `At best` is the least that these busy times leave: the slowest stage sets the pace, or "
        "the way of a microbatch through all of them. A machine with fewer cores than stages cannot run all of them "
        "at once: there the figure is of the cores, and not of the pipeline.",
    )
    return _grid("Stages without work", BUBBLE_COLUMNS, rows, notes)


# ---- handoff


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPair:
    """A prefill worker's mesh and a decode worker's."""

    name: str
    prefill: MeshShape
    decode: MeshShape
    decode_rules: DecodeRules = DECODE


MESH_PAIRS = (
    MeshPair(name="1 to 1", prefill=MeshShape(), decode=MeshShape()),
    MeshPair(name="tensor 2 to tensor 2", prefill=MeshShape(tensor=2), decode=MeshShape(tensor=2)),
    MeshPair(name="tensor 2 to data 2", prefill=MeshShape(tensor=2), decode=MeshShape(data=2)),
    MeshPair(
        name="pipe 2 to tensor 2 by tokens",
        prefill=MeshShape(pipe=2),
        decode=MeshShape(tensor=2),
        decode_rules=DecodeRules(kv_tokens=("tensor",)),
    ),
)


def of_pair(name: str, pair: str) -> str:
    """The name of a handoff's figure for one pair of meshes."""
    return f"{name}, {pair}"


def mesh_handoff_grid(measurements: Sequence[Measurement], plan: Plan) -> Grid:
    """The table of handoffs, for each pair of meshes."""
    found = _found(measurements)
    rows = []
    for pair in (each.name for each in MESH_PAIRS):
        own = {name.removesuffix(of_pair("", pair)): one for name, one in found.items() if name.endswith(f", {pair}")}
        rows += [(pair, *row) for row in handoff_rows(own, plan.mesh_handoff_tokens)]
    notes = (
        "Handoff by meshes: medians on an idle system of one prefill and one decode worker, whose devices are virtual "
        "and share the machine's cores: more of them are no more hardware here.",
    )
    return _grid("The exposed part of a handoff, by meshes", ("meshes", *HANDOFF_COLUMNS), rows, notes)


MESH_GRIDS = (reshard_grid, collectives_grid, bubble_grid, mesh_handoff_grid)


def _found(measurements: Sequence[Measurement]) -> dict[str, Measurement]:
    return {one.name: one for one in measurements if one.level == "meshes"}


def _grid(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], notes: tuple[str, ...]) -> Grid:
    return Grid(title=title, columns=columns, rows=tuple(rows), notes=notes if rows else ())
