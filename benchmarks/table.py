"""`python -m benchmarks table [W1,W2,...] [options]`: every workload for every system, each once, into a folder; then
docs/performance.md and its pictures are written of what is there.

Each cell is a file. One that is there is not measured again, so it may be stopped at any time and goes on where it was:
`--minutes 20` begins only what fits into so many. What is most wanted comes first: Timebell on PostgreSQL and the
strongest of the others in each workload, then two processes and SQLite, then the rest. `--plan` prints the cells in
this order, with the seconds that each takes. `--again` also measures what failed, was given up, created late or
disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import machine, performance, report
from benchmarks.peers.systems import PEERS, prepare
from benchmarks.systems import Measured, Server, TimebellOnPostgres, TimebellOnSqlite
from benchmarks.workloads import SCALES, WORKLOADS, Sizes

CHOSEN = ("W1", "W2", "W3", "W4", "W5", "W6")
SYSTEMS: dict[str, type[Any]] = {"sqlite": TimebellOnSqlite, "postgres": TimebellOnPostgres, **PEERS}
STRONGEST = {  # of the others: they are measured right after ours, before the rest
    "W1": ("graphile", "pgboss"), "W2": ("graphile", "pgboss"), "W3": ("celery", "apscheduler"),
    "W4": ("bullmq", "pgqueuer"), "W5": ("bullmq", "graphile"), "W6": ("graphile", "pgboss"),
}  # fmt: skip
TWICE = {  # what is also measured with two processes
    "postgres": CHOSEN, **dict.fromkeys(("pgqueuer", "graphile", "pgboss", "bullmq"), ("W2", "W6")),
}  # fmt: skip
PACES = {  # jobs a second that each makes, and runs, at the least: how long a cell takes
    "sqlite": (60_000, 10_000), "postgres": (50_000, 10_000), "pgqueuer": (25_000, 9_000), "graphile": (35_000, 12_000),
    "pgboss": (28_000, 15_000), "bullmq": (18_000, 9_000), "procrastinate": (9_000, 430),
    "apscheduler": (1_200, 1_200), "celery": (1_700, 850),
}  # fmt: skip
LOADS = {"postgres": 25_000, "sqlite": 60_000}  # rows a second, by the server itself
AROUND = 10  # seconds: a fresh database, processes that start and end
NODE = {"graphile": "graphile-worker", "pgboss": "pg-boss", "bullmq": "bullmq"}
DISTURBED = 0.3  # cores that others took, from which on a figure is of a busy machine


@dataclass(frozen=True)
class Cell:
    """One figure of the table."""

    workload: str
    system: str
    processes: int
    place: int

    @property
    def file(self) -> str:
        """Its name in the folder."""
        return f"{self.workload}-{self.system}-{self.processes}.json"

    def seconds(self, sizes: Sizes) -> float:
        """How long it takes, roughly."""
        kind: type[Measured] = SYSTEMS[self.system]
        make, run = PACES[self.system]

        def count(size: int) -> int:
            return min(size, kind.most.get(self.workload, size))

        steady = 3 + sizes.steady / kind.pace + sizes.span
        backlog = count(sizes.backlog) / LOADS.get(self.system, make)
        took = {
            "W1": count(sizes.create) / make,
            "W2": 3 + count(sizes.burst) / kind.pace + count(sizes.burst) / run,
            "W3": steady,
            "W4": backlog + steady + sizes.idle + 15,
            "W5": 75 + (60 + 40) * kind.fires_at_once,
            "W6": count(sizes.drain) / make + count(sizes.drain) / run,
        }
        return AROUND + took[self.workload]

    def limit(self, sizes: Sizes) -> float:
        """Seconds after which it is given up."""
        return 60 + 3 * self.seconds(sizes)


def planned(workloads: Sequence[str], systems: Sequence[str]) -> Iterator[Cell]:
    """The cells in the order in which they are measured; who is compared comes one after the other."""
    cells = []
    for workload in workloads:
        for place, (processes, system) in enumerate((count, name) for count in (1, 2) for name in SYSTEMS):
            measured = processes == 1 or workload in TWICE.get(system, ())
            if measured and system in systems and SYSTEMS[system].most.get(workload) != 0:
                cells.append(Cell(workload, system, processes, place))
    yield from sorted(cells, key=_turn)


def _turn(cell: Cell) -> int:
    """The first are those that are most wanted, if there is not time for all."""
    compared = cell.system == "postgres" or cell.system in STRONGEST[cell.workload]
    if compared and cell.processes == 1:
        return 0
    return 1 if compared or cell.system == "sqlite" else 2


def left(cells: Sequence[Cell], folder: Path, *, again: bool) -> list[Cell]:
    """Those that are not in the folder, or with `again` have no figure worth showing."""

    def done(cell: Cell) -> bool:
        file = folder / cell.file
        return file.exists() and not (again and _doubt(json.loads(file.read_text())["median"]))

    return [cell for cell in cells if not done(cell)]


def _doubt(figures: dict[str, Any]) -> str:
    """Why such figures are not worth showing; empty if they are."""
    if "error" in figures:
        return str(figures["error"])
    if figures.get("created_late"):
        return "created late"
    foreign = figures.get("foreign_cores", 0.0)
    return f"disturbed: others took {foreign:.1f} cores" if foreign > DISTURBED else ""


async def _figures(cell: Cell, server: Server, sizes: Sizes) -> tuple[dict[str, Any], str]:
    """What was measured, or why nothing was; and the version of what measured."""
    limit = cell.limit(sizes)
    deadline = asyncio.timeout(limit)
    kind, named = SYSTEMS[cell.system], _version(cell.system)
    try:
        await server.revive()
        chosen = kind() if cell.system == "sqlite" else kind(server)
        async with deadline, chosen as system:
            named += f" on {system.server_version}" if system.server_version else ""
            return await WORKLOADS[cell.workload](system, cell.processes, sizes), named
    except Exception as failed:  # one that fails must not cost us the others
        if isinstance(failed, TimeoutError) and deadline.expired():
            return {"error": f"given up after {limit:.0f} s"}, named
        why = " ".join(f"{type(failed).__name__}: {failed}".split())
        return {"error": why[:200].rstrip(": ")}, named


async def _measure(cells: Sequence[Cell], folder: Path, sizes: Sizes, minutes: float) -> None:
    server, until = Server(), time.monotonic() + 60 * minutes
    await server.start()
    try:
        _remember(folder, server, sizes)
        for at, cell in enumerate(cells, 1):
            needs = cell.seconds(sizes)
            label = f"[{at}/{len(cells)}] {cell.file.removesuffix('.json')}"
            if time.monotonic() + needs > until:
                _say(f"{label}: left for later, as it takes {needs:.0f} s")
                continue
            _say(f"{label}: {needs:.0f} s or so")
            begin = time.monotonic()
            figures, named = await _figures(cell, server, sizes)
            _keep(cell, folder, figures, named)
            doubt = _doubt(figures)
            brief = "" if "error" in figures else _brief(figures)
            _say(f"    {time.monotonic() - begin:.0f} s  {brief}{'  NO FIGURE: ' if doubt else ''}{doubt}")
    finally:
        await server.close()


def _keep(cell: Cell, folder: Path, figures: dict[str, Any], named: str) -> None:
    kind = SYSTEMS[cell.system]
    kept = {
        "workload": cell.workload, "system": kind.name, "store": kind.store, "processes": cell.processes,
        "version": named, "place": cell.place, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "median": {name: _short(value) for name, value in figures.items()},
    }  # fmt: skip
    beside = folder / f"{cell.file}.part"  # who is stopped leaves no half of a file
    beside.write_text(json.dumps(kept) + "\n")
    beside.replace(folder / cell.file)


def _remember(folder: Path, server: Server, sizes: Sizes) -> None:
    """Write down where this is measured. SystemExit where what is in the folder is of elsewhere."""
    facts = machine.facts()
    postgres = {"version": server.version, **server.settings}
    found = {"machine": facts, "postgres": postgres, "sizes": asdict(sizes)}
    file = folder / performance.MACHINE
    if file.exists():
        was = json.loads(file.read_text())
        here = (facts["processor"], facts["cores"], asdict(sizes))
        if (was["machine"]["processor"], was["machine"]["cores"], was["sizes"]) != here:
            raise SystemExit(f"What is in {folder} is of another machine or other sizes: say --folder, or remove it.")
        return
    file.write_text(json.dumps(found, indent=1) + "\n")


def _version(system: str) -> str:
    if system in LOADS:
        return f"{version('timebell')}{_commit()}"
    if SYSTEMS[system].module.endswith(".mjs"):
        from benchmarks import node  # needs a package of its own

        return node.PACKAGES[NODE[system]]
    return version(system)


def _commit() -> str:
    """The last commit that changed what is measured, in brackets; nothing where there is no repository."""
    command = ["git", "log", "-1", "--format= (%h)", "--", "src"]
    try:
        ran = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    except OSError:
        return ""
    return ran.stdout.rstrip()


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _brief(figures: dict[str, Any]) -> str:
    names = ("jobs_s", "lag_p50_ms", "lag_p99_ms", "pass_p99_ms", "idle_server_cpu_s", *report.SUMMED)
    return ", ".join(f"{name} {report.number(figures[name])}" for name in names if figures.get(name) is not None)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=__doc__, allow_abbrev=False)
    parser.add_argument("workloads", nargs="?", default=[*CHOSEN], type=report.some_of(CHOSEN), metavar="W1,W2,...")
    parser.add_argument("--systems", default=[*SYSTEMS], type=report.some_of([*SYSTEMS]), help=",".join(SYSTEMS))
    parser.add_argument("--folder", type=Path, default=performance.RESULTS, help="of the results")
    parser.add_argument("--scale", default="full", choices=[*SCALES], help="a small one needs a folder of its own")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="begin only what fits into so many")
    parser.add_argument("--again", action="store_true", help="also what gave no figure worth showing")
    parser.add_argument("--plan", action="store_true", help="print what is left to measure, and measure nothing")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """The exit status: 0 if every cell that was asked for is there and has figures."""
    asked = _arguments(given)
    own = asked.folder.resolve() == performance.RESULTS.resolve()
    if own and asked.scale != "full":
        raise SystemExit("The figures of the page are of full size: say --folder for others.")
    sizes = SCALES[asked.scale]
    cells = list(planned(asked.workloads, asked.systems))
    waiting = left(cells, asked.folder, again=asked.again)
    if asked.plan:
        for cell in waiting:
            print(f"{cell.file.removesuffix('.json'):28}{cell.seconds(sizes):6.0f} s")
        total = sum(cell.seconds(sizes) for cell in waiting) / 60
        print(f"{len(waiting)} of {len(cells)} cells are left: {total:.0f} minutes")
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    try:
        if waiting:
            missing = prepare([name for name in PEERS if any(cell.system == name for cell in waiting)])
            for name, why in missing.items():
                _say(f"{name} is not there, so its cells are left out: {why}. Install requirements/bench.txt.")
            waiting = [cell for cell in waiting if cell.system not in missing]
            asyncio.run(_measure(waiting, asked.folder, sizes, asked.minutes))
    finally:
        performance.write(asked.folder)
        _, kept = performance.read(asked.folder)
        for workload in asked.workloads:
            if some := [cell for cell in kept if cell["workload"] == workload]:
                print(f"{report.workload_table(workload, some)}\n")
        doubtful = len(left(cells, asked.folder, again=True))
        _say(
            f"{doubtful} of {len(cells)} cells have no good figure yet; the page is {performance.page_of(asked.folder)}"
        )
    return 1 if left(cells, asked.folder, again=True) else 0
