"""The page docs/performance.md, and its pictures, from the figures that `python -m benchmarks table` has kept, and from
those of `plans`, `soak` and `pinned`.

`python -m benchmarks.performance` writes them once more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine as machines
from benchmarks import plots, report

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- What follows is written by `python -m benchmarks table`. -->\n", "<!-- So far. -->\n"
UNMEASURED = "No figures are kept here yet: `python -m benchmarks table` takes them, and writes them into this page.\n"
MACHINE = "machine.json"
DRAWN = {
    "W1": "jobs created a second", "W2": "jobs a second, from the instant at which all are due",
    "W3": "lag, p50 to p99", "W4": "lag with a backlog, p50 to p99", "W5": "lag of schedules, p50 to p99",
    "W6": "jobs a second, to durable completion",
}  # fmt: skip
LONG = {
    "plans": "Ten million pending jobs", "soak-postgres": "A soak on PostgreSQL", "soak-sqlite": "A soak on SQLite",
    "pinned": "A snapshot that stays",
}  # fmt: skip
"""What else is kept: by name of the file, its heading."""

Cell = dict[str, Any]
Long = dict[str, Any]
"""What was `said`, in lines, and `tables`, each of lines of texts; `at`, and the `machine`."""


def read(folder: Path) -> tuple[dict[str, Any] | None, list[Cell]]:
    """What is known of the machine, if anything was measured, and the cells in the order of the table."""
    file = folder / MACHINE
    machine = json.loads(file.read_text()) if file.exists() else None
    cells = [json.loads(one.read_text()) for one in sorted(folder.glob("W*.json"))]
    return machine, sorted(cells, key=lambda cell: (cell["workload"], cell["place"]))


def others(folder: Path) -> dict[str, Long]:
    """What else is kept."""
    files = {name: folder / f"{name}.json" for name in LONG}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def keep(folder: Path, name: str, said: Sequence[str], tables: Sequence[Sequence[Sequence[str]]]) -> None:
    """Put the figures of a command into the folder, and on the page."""
    folder.mkdir(parents=True, exist_ok=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept = {"at": at, "machine": machines.line(), "said": [*said], "tables": tables}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    write(folder)


def rendered(page: str, machine: dict[str, Any] | None, cells: Sequence[Cell], long: dict[str, Long]) -> str:
    """The page, with these figures between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError("the page has no marks for the figures")
    lines = [] if machine is None or not cells else _sections(machine, cells)
    for name, kept in long.items():
        lines += _section(name, kept)
    text = "\n".join([*lines, ""]) if lines else UNMEASURED
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _sections(machine: dict[str, Any], cells: Sequence[Cell]) -> list[str]:
    lines = [_where(machine, cells)]
    for workload, picture in DRAWN.items():
        some = [cell for cell in cells if cell["workload"] == workload]
        if not some:
            continue
        lines.append(f"\n## {workload}: {report.TITLES[workload]}\n")
        if name := _name(workload) if _drawable(workload, some) else "":
            lines.append(f"![{workload}: {picture}](img/{name})\n")
        lines += _table(report.workload_lines(workload, some))
    return lines


def _section(name: str, kept: Long) -> list[str]:
    command = f"`python -m benchmarks {name.split('-')[0]}`, {kept['at'][:10]}: {kept['machine']}."
    lines = [f"\n## {LONG[name]}\n", command, ""]
    lines += [f"- {said}" for said in kept["said"]]
    for table in kept["tables"]:
        lines += ["", *_table(table)]
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = rows
    lines = [_row(head), "|---" + "|---:" * (len(head) - 1) + "|"]
    return lines + [_row([*row, *[""] * (len(head) - len(row))]) for row in rest]


def _row(texts: Sequence[str]) -> str:
    return "|" + "".join(f" {text.replace('|', '/')} |" if text else " |" for text in texts)


def _where(machine: dict[str, Any], cells: Sequence[Cell]) -> str:
    days = sorted({cell["at"][:10] for cell in cells})
    facts, server = machine["machine"], machine["postgres"]
    settings = ", ".join(f"{name} {value}" for name, value in server.items() if name != "version")
    measured = dict.fromkeys(f"{cell['system']} {cell['version']}" for cell in cells)
    return (
        f"Measured on {' and '.join([days[0], days[-1]] if len(days) > 1 else days)}: {facts['cores']} cores"
        f" ({facts['processor']}), {facts['memory_gb']} GB, Linux {facts['kernel']}; a durable write of 8 KiB takes"
        f" {facts['fdatasync_us']} µs. Python {facts['python']}, PostgreSQL {server.get('version')} ({settings});"
        f" {', '.join(measured)}."
    )


def pictures(cells: Sequence[Cell]) -> dict[str, str]:
    """The pictures, by file name."""
    drawn = {}
    for workload, title in DRAWN.items():
        some = _drawable(workload, [cell for cell in cells if cell["workload"] == workload])
        if not some:
            continue
        title = f"{workload}: {title}"
        if "jobs_s" in some[0]["median"]:
            rows = [(_label(cell), cell["median"]["jobs_s"], _ours(cell)) for cell in some]
            drawn[_name(workload)] = plots.bars(title, sorted(rows, key=lambda row: -row[1]))
        else:
            lags = [
                (_label(cell), cell["median"]["lag_p50_ms"], cell["median"]["lag_p99_ms"], _ours(cell)) for cell in some
            ]
            drawn[_name(workload)] = plots.spans(title, sorted(lags, key=lambda row: row[2]))
    return drawn


def _drawable(workload: str, cells: Sequence[Cell]) -> list[Cell]:
    wanted = "jobs_s" if workload in ("W1", "W2", "W6") else "lag_p99_ms"
    return [cell for cell in cells if cell["median"].get(wanted) and not cell["median"].get("created_late")]


def _name(workload: str) -> str:
    return f"performance-{workload.lower()}.svg"


def _label(cell: Cell) -> str:
    where = f", {cell['store']}" if _ours(cell) else ""
    return f"{cell['system']}{where}{', 2 processes' if cell['processes'] > 1 else ''}"


def _ours(cell: Cell) -> bool:
    return bool(cell["system"] == "Timebell")


def page_of(folder: Path) -> Path:
    """Where the figures of a folder are shown."""
    return PAGE if folder.resolve() == RESULTS.resolve() else folder / "performance.md"


def write(folder: Path = RESULTS) -> None:
    """Bring the page and its pictures up to date; a page that is not there yet is made."""
    page = page_of(folder)
    machine, cells = read(folder)
    text = page.read_text() if page.exists() else f"# Performance\n\n{BEGIN}{END}"
    page.write_text(rendered(text, machine, cells, others(folder)))
    images = page.parent / "img"
    for old in images.glob("performance-*.svg"):
        old.unlink()
    for name, drawn in pictures(cells).items():
        images.mkdir(exist_ok=True)
        (images / name).write_text(drawn)


if __name__ == "__main__":
    write()
