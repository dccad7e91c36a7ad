"""Write the generated parts of docs/internals/architecture.md: the layers, and the packages with their imports.

`python scripts/architecture.py` updates the page. The layers come from the import-linter contract in pyproject.toml,
the sentences from the docstrings, and the imports from the code.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "internals" / "architecture.md"
BEGIN, END = "<!-- begin: scripts/architecture.py -->", "<!-- end: scripts/architecture.py -->"

Graph = Mapping[str, Mapping[str, int]]
"""Imports: module -> imported module -> line of the import."""


def import_graph(source: Path = SOURCE) -> Graph:
    """Return the imports between the modules below `source`, including those in functions.

    Imports under `if TYPE_CHECKING` are excluded. An import of a name counts for the module that contains it, not for
    the packages above that module.
    """
    files = {_module_name(path.relative_to(source)): path for path in sorted(source.rglob("*.py"))}
    return {
        module: {
            imported: line
            for imported, line in _imports(ast.parse(path.read_text()), _package_of(module, path), set(files))
            if imported != module
        }
        for module, path in files.items()
    }


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _imports(node: ast.AST, package: str, modules: set[str]) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name in modules:
                yield alias.name, node.lineno
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            imported = f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
            if imported in modules:
                yield imported, node.lineno
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for statement in node.orelse:
            yield from _imports(statement, package, modules)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, modules)


def find_cycle(graph: Graph) -> list[str] | None:
    """Return the shortest import cycle as a path that ends where it begins, or None."""
    cycles = [cycle for module in graph if (cycle := _shortest_cycle(graph, module)) is not None]
    return min(cycles, key=len, default=None)


def _shortest_cycle(graph: Graph, start: str) -> list[str] | None:
    paths = [[start]]
    visited: set[str] = set()
    for path in paths:  # breadth-first: `paths` grows while it is traversed
        for imported in graph[path[-1]]:
            if imported == start:
                return [*path, start]
            if imported not in visited:
                visited.add(imported)
                paths.append([*path, imported])
    return None


def layers() -> list[list[str]]:
    """Return the packages of each layer in the import-linter contract, from the top to the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["type"] == "layers" and each["containers"] == ["timebell"])
    return [[name.strip(" ()") for name in re.split("[:|]", layer)] for layer in contract["layers"]]


def package_imports() -> dict[str, set[str]]:
    """Return the packages that each package imports, without those that it also reaches through another one."""
    imports: dict[str, set[str]] = {name: set() for layer in layers() for name in layer}
    for module, imported_modules in import_graph().items():
        package = _top(module)
        for imported in map(_top, imported_modules):
            if package in imports and imported in imports and imported != package:
                imports[package].add(imported)
    return {
        package: {name for name in direct if not any(name in _reachable(imports, other) for other in direct - {name})}
        for package, direct in imports.items()
    }


def _top(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def _reachable(imports: Mapping[str, set[str]], package: str) -> set[str]:
    pending, found = [package], set[str]()
    while pending:
        new = imports[pending.pop()] - found
        found |= new
        pending += new
    return found


def _summary(package: str) -> str:
    """Return the first line of the docstring of a package or module."""
    path = SOURCE / "timebell" / package
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path} has no docstring.")
    return docstring.splitlines()[0]


def render() -> str:
    """Return the generated part of the page."""
    rows = ["   ".join(names) for names in layers()]
    width = max(map(len, rows))
    rule = "─" * (width + 2)
    diagram = f"\n├{rule}┤\n".join(f"│ {row:<{width}} │" for row in rows)
    imports = package_imports()
    table = [
        f"| `{package}` | {_summary(package)} | {', '.join(f'`{name}`' for name in sorted(imports[package]))} |"
        for names in layers()
        for package in names
    ]
    return "\n".join(
        [
            "```text", f"┌{rule}┐", diagram, f"└{rule}┘", "```", "",
            "| package | content | imports |", "|---|---|---|", *table,
        ]
    )  # fmt: skip


def updated_page(page: str) -> str:
    """Return the text of the page with a current generated part."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text()))
