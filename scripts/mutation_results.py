"""Results of `scripts/mutate.py`: one file per module in tests/mutation, and the page docs/internals/mutation.md."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path

Equivalent = dict[str, dict[str, str]]
"""Mutants that behave like the original: path of the module below src -> id -> reason."""


@dataclass
class ModuleResult:
    """Result of all mutants of one module. `cpu_seconds` is the time of its tests without a mutant."""

    killed: int = 0
    survived: list[str] = field(default_factory=list)
    untested: int = 0
    cpu_seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.killed + len(self.survived) + self.untested


def read_results(root: Path) -> dict[str, ModuleResult]:
    """Return the stored results by path of the module below src."""
    folder = root / "tests" / "mutation"
    files = sorted(folder.rglob("*.json"))
    return {
        file.relative_to(folder).with_suffix(".py").as_posix(): ModuleResult(**json.loads(file.read_text()))
        for file in files
    }


def write_result(root: Path, module: str, result: ModuleResult) -> None:
    """Store the result of a module, and write the page."""
    file = (root / "tests" / "mutation" / module).with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")
    page = root / "docs" / "internals" / "mutation.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(read_results(root), read_equivalent(root)))


def read_equivalent(root: Path) -> Equivalent:
    """Return the mutants that are marked as equivalent."""
    file = root / "tests" / "mutation" / "equivalent.toml"
    return tomllib.loads(file.read_text()) if file.exists() else {}


def render(results: dict[str, ModuleResult], equivalent: Equivalent) -> str:
    """Return the page: the score of each module, survivors, and equivalent mutants with their reasons."""
    survivors = [f"- `{module}`: `` {id_} ``" for module, result in results.items() for id_ in result.survived]
    marked = [f"- `{module}`: `` {id_} ``, {why}" for module, ids in equivalent.items() for id_, why in ids.items()]
    totals = [("**all**", list(results.values()))] if results else []
    rows = [_row(name, group) for name, group in [*((f"`{m}`", [r]) for m, r in results.items()), *totals]]
    return PAGE.format(
        rows="\n".join(rows), survivors="\n".join(survivors) or "None.", marked="\n".join(marked) or "None."
    )


def _row(name: str, results: list[ModuleResult]) -> str:
    total, killed = sum(result.total for result in results), sum(result.killed for result in results)
    survived, untested = sum(len(result.survived) for result in results), sum(result.untested for result in results)
    return f"| {name} | {total} | {killed} | {survived} | {untested} | {killed / max(1, total):.0%} |"


PAGE = """# Mutation testing

<!-- Written by scripts/mutate.py from tests/mutation; do not edit. -->

A mutant is the product with one small bug: a changed operator, constant, condition or argument, or a removed statement.
Each mutant runs against the unit tests of its module and, if they pass, against its other tests, on SQLite. It survives
if all of them pass; then a test is missing, or the mutant behaves like the original and is listed in
`tests/mutation/equivalent.toml` with the reason. The table lists the modules that were run completely. Each CI run
repeats some of their mutants, chosen by commit, and fails if one survives that is not listed here.

Tests whose name or parameters contain `postgres` or `mariadb` are left out.

```text
make mutate                                            # all modules: many hours
make mutate MUTATE="--modules timebell/model/page.py"  # all mutants of one module
make mutate MUTATE="--check --budget 75 --seed 7"      # those that CI runs
```

## Score

| module | mutants | killed | survived | without tests | score |
|---|---|---|---|---|---|
{rows}

## Survivors

{survivors}

## Equivalent mutants

{marked}
"""
