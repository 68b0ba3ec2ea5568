"""Contracts for import-linter: `only` (what a package may import), `home` (who imports a library).

import-linter's own `forbidden` contract lists what is not allowed, so it says nothing of a library
or a package that is added later, and it fails on one that does not exist yet. These list what is
allowed. Every package on a list has a list of its own, so what holds for direct imports holds for
the whole chain.
"""

import sys
from fnmatch import fnmatchcase

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyContract(Contract):
    """`package` imports only itself, `may_import` and the standard library without `but_not`; `free` modules of it are
    not bound.

    A name stands for the module and all below it; `*` in a name stands for any characters.
    """

    type_name = "only"

    package = fields.StringField()
    may_import = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    but_not = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    free = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Collects the imports that are not on the list."""
        found = [
            (importer, imported)
            for importer in graph.modules
            if _is_in(importer, self.package) and not any(_is_in(importer, name) for name in self.free)
            for imported in graph.find_modules_directly_imported_by(importer)
            if not self._allows(imported)
        ]
        return _result(graph, found)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Says each import that broke the contract, and which would not have."""
        _print_imports(check)
        allowed = ", ".join(["the standard library", *self.may_import])
        output.print_error(f"{self.package} may import: {allowed}", bold=False)
        if self.but_not:
            output.print_error(f"but not: {', '.join(self.but_not)}", bold=False)
        output.new_line()

    def _allows(self, module: str) -> bool:
        if any(_is_in(module, name) for name in self.but_not):
            return False
        if module.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(_is_in(module, name) for name in [self.package, *self.may_import])


class HomeContract(Contract):
    """`library` is imported in `home` and nowhere else: its quirks and its types end there."""

    type_name = "home"

    library = fields.StringField()
    home = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Collects the imports of the library from elsewhere."""
        found = [
            (importer, imported)
            for imported in graph.modules
            if _is_in(imported, self.library)
            for importer in graph.find_modules_that_directly_import(imported)
            if not any(_is_in(importer, name) for name in self.home)
        ]
        return _result(graph, found)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Says each import that broke the contract, and where it would be right."""
        _print_imports(check)
        output.print_error(f"{self.library} may be imported in {', '.join(self.home)} only", bold=False)
        output.new_line()


def _is_in(module: str, package: str) -> bool:
    return fnmatchcase(module, package) or fnmatchcase(module, package + ".*")


def _result(graph: ImportGraph, found: list[tuple[str, str]]) -> ContractCheck:
    imports = []
    for importer, imported in sorted(found):
        details = graph.get_import_details(importer=importer, imported=imported)
        imports.append((importer, imported, sorted({d["line_number"] for d in details})))
    return ContractCheck(kept=not imports, metadata={"imports": imports})


def _print_imports(check: ContractCheck) -> None:
    for importer, imported, lines in check.metadata["imports"]:
        where = ", ".join(f"l.{line}" for line in lines)
        output.print_error(f"- {importer} -> {imported} ({where})", bold=False)
    output.new_line()
