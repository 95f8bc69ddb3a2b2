"""A contract for import-linter, which has none of the kind: these modules import nothing but what is listed.

A list of forbidden modules would grow with every library; this one grows only when the control plane needs more.
"""

import grimp
from importlinter import Contract, ContractCheck, fields, output


class Only(Contract):
    """`source_modules` and what is below them import each other and, directly, what is below `allowed_modules`."""

    type_name = "only"

    source_modules = fields.ListField(subfield=fields.StringField())
    allowed_modules = fields.ListField(subfield=fields.StringField())

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        del verbose
        sources = list(map(str, self.source_modules))  # pyright: ignore[reportArgumentType]
        allowed = (*sources, *map(str, self.allowed_modules))  # pyright: ignore[reportArgumentType]
        found = {
            (importer, imported)
            for importer in graph.modules
            if _is_below(importer, sources)
            for imported in graph.find_modules_directly_imported_by(importer)
            if not _is_below(imported, allowed)
        }
        return ContractCheck(kept=not found, metadata={"found": sorted(found)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["found"]:
            output.print_error(f"{importer} imports {imported}, which is not on its list")


def _is_below(module: str, roots: list[str] | tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)
