"""Which collectives a compiled program runs, and how often: read from the text of its HLO.

There a loop's body is a computation of its own, so a collective inside it stands in the text once and runs once a turn.
What is returned is a tree of loop turns. A pair of `-start` and `-done` is one collective. Bytes, and the devices that
take part, are not read.
Source: HLO's text format, as `xla/hlo/parser` reads it.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
START, DONE = "-start", ("-done", "-update")
HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$")
CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
OP_NAME = re.compile(r'\bop_name="([^"]*)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopTurn:
    """What runs once per turn of a loop (or per run of the program), and the loops inside it, in the text's order."""

    counts: Counter[str]
    op_names: frozenset[str]  # jax's names of the instructions, scopes included
    loops: tuple["LoopTurn", ...]

    def has_scope(self, scope: str) -> bool:
        """Whether some of this, the loops inside left out, was written under that name: `/attention/`."""
        return any(scope in op_name for op_name in self.op_names)

    @property
    def total(self) -> Counter[str]:
        """The number of collectives when each loop inside makes one turn."""
        return sum((loop.total for loop in self.loops), self.counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Instruction:
    opcode: str
    called: tuple[str, ...]
    op_name: str


def read_program(hlo: str) -> LoopTurn:
    """The tree of turns of a compiled program. ValueError for a text without an entry computation."""
    computations, entry = _parse(hlo)
    if entry is None:
        raise ValueError("this HLO has no entry computation")
    return _turn(computations, (entry,))


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = None, []
    for line in hlo.splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif found := INSTRUCTION.match(line):
            current.append(_instruction(found["opcode"], found["rest"]))
    return computations, entry


def _instruction(opcode: str, rest: str) -> _Instruction:
    lists = (name.strip().lstrip("%") for names in CALLED_LIST.findall(rest) for name in names.split(","))
    op_name = OP_NAME.search(rest)
    return _Instruction(
        opcode=opcode, called=(*CALLED.findall(rest), *lists), op_name=op_name[1] if op_name is not None else ""
    )


def _turn(computations: Mapping[str, list[_Instruction]], names: tuple[str, ...]) -> LoopTurn:
    """All that these computations run, and what they call; the turns of their loops apart."""
    counts, op_names, loops = Counter[str](), set[str](), list[LoopTurn]()
    for instruction in (each for name in names for each in computations.get(name, ())):
        op_names.add(instruction.op_name)
        opcode = instruction.opcode.removesuffix(START)
        if opcode in COLLECTIVES:
            counts[opcode] += 1
        elif instruction.opcode == "while":
            loops.append(_turn(computations, instruction.called))
        elif instruction.called and not opcode.endswith(DONE):
            inside = _turn(computations, instruction.called)
            counts += inside.counts
            loops += inside.loops
    return LoopTurn(counts=counts, op_names=frozenset(op_names), loops=tuple(loops))
