"""What the operations of a compiled program are: which part of a step each belongs to, and what it is called.

The part is the innermost `jax.named_scope` of the forward pass around it; XLA gives a fusion the name of its last
operation. What has no such scope, like rotary angles or embeddings, belongs to no part.
Source: HLO's text format, as `xla/hlo/parser` reads it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moonshard.experiments.bench.floors.work import StepWork, Work

PROJECTIONS, PAGES, ROUTER, EXPERTS, MLP, HEAD = (
    *("projections", "attention over pages", "router", "routed experts", "dense layers, shared experts", "head"),
)
PARTS: Mapping[str, str] = {
    "attention": PROJECTIONS,
    "pages": PAGES,
    "feed_forward": MLP,
    "router": ROUTER,
    "experts": EXPERTS,
    "head": HEAD,
}  # by scope
OTHER, SAMPLING = "other", "sampling"
CONTAINERS = ("while", "call", "conditional", "async-start", "async-done", "async-update")
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?:\(.*?\)|\S+) (?P<opcode>[a-z][a-z0-9-]*)\(", re.MULTILINE
)
TARGET = re.compile(r'custom_call_target="([^"]*)"')
OP_NAME = re.compile(r'\bop_name="([^"]*)"')
NUMBER = re.compile(r"(\.\d+)+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    part: str
    kind: str  # a kernel's name, an opcode, or what XLA fused

    @property
    def is_container(self) -> bool:
        """Whether it only runs others, whose time is their own."""
        return self.kind in CONTAINERS


def read_operations(hlo: str) -> dict[str, Operation]:
    """By name, from the text of a compiled program."""
    found = {}
    for line in hlo.splitlines():
        if (instruction := INSTRUCTION.match(line)) is None:
            continue
        name, opcode = instruction["name"], instruction["opcode"]
        scopes = OP_NAME.search(line)
        found[name] = Operation(part=part_of(scopes[1] if scopes else ""), kind=_kind(name, opcode, line))
    return found


def part_of(op_name: str) -> str:
    """The part of a step that an operation belongs to, by the name that jax gave it: `jit(_run)/attention/mul`."""
    return next((PARTS[scope] for scope in reversed(op_name.split("/")) if scope in PARTS), OTHER)


def parts_of(work: StepWork) -> dict[str, Work]:
    """The least that each part asks."""
    return {
        PROJECTIONS: work.projections,
        PAGES: work.attention,
        ROUTER: work.router,
        EXPERTS: work.routed,
        MLP: work.mlp,
        HEAD: work.head,
    }


def _kind(name: str, opcode: str, line: str) -> str:
    if target := TARGET.search(line):
        return target[1]
    return NUMBER.sub("", name) if opcode == "fusion" else opcode
