"""Medians of runs, and tables of medians with the ratio to the best peer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

# By workload: (figure, heading, whether more is better), in display order.
COLUMNS: dict[str, Sequence[tuple[str, str, bool | None]]] = {
    "W1": [("jobs_s", "jobs/s", True)],
    "W2": [
        ("jobs_s", "jobs/s", True), ("lag_p50_ms", "p50 ms", False), ("lag_p99_ms", "p99 ms", False),
        ("durable_s", "durable s", False),
    ],
    "W3": [("lag_p50_ms", "p50 ms", False), ("lag_p99_ms", "p99 ms", False), ("lag_max_ms", "max ms", False)],
    "W4": [
        ("backlog", "backlog", None), ("lag_p50_ms", "p50 ms", False), ("lag_p99_ms", "p99 ms", False),
        ("idle_server_cpu_s", "idle server CPU s", False), ("idle_worker_cpu_s", "idle worker CPU s", False),
        ("worker_rss_mb", "worker MB", False),
    ],
    "W5": [
        ("lag_p50_ms", "p50 ms", False), ("lag_p99_ms", "p99 ms", False), ("create_s", "create s", None),
        ("pass_p99_ms", "planner p99 ms", None),
    ],
    "W6": [("jobs_s", "jobs/s", True), ("durable_s", "durable s", False), ("create_jobs_s", "created/s", True)],
    **dict.fromkeys(("W7", "W8", "W8s", "W9"), (("jobs_s", "jobs/s", True), ("worker_us", "worker us a job", False))),
    **dict.fromkeys(
        ("W12", "W12r"),
        (
            ("jobs_s", "requests/s", True), ("worker_us", "node us a request", False), ("lag_p50_ms", "p50 ms", False),
            ("lag_p99_ms", "p99 ms", False),
        ),
    ),
    "tenants": [
        ("lag_p50_ms", "p50 ms", False), ("lag_p95_ms", "p95 ms", False), ("lag_max_ms", "max ms", False),
        ("flood_jobs_s", "flood jobs/s", True), ("flood_left", "flood left", None),
    ],
}  # fmt: skip
TITLES = {
    "W1": "create one-shots over 24 h",
    "W2": "burst: all due at one instant",
    "W3": "steady: due at random milliseconds",
    "W4": "steady with a backlog, then idle",
    "W5": "schedules due at the same full minute",
    "W6": "due now, to durable completion",
    "W7": "async handlers that await 5 ms, to durable completion",
    "W8": "plain functions, to durable completion",
    "W8s": "plain functions that sleep 2 ms, to durable completion",
    "W9": "signed webhooks to a receiver on this machine, to durable completion",
    "W12": "jobs created over HTTP, one per request",
    "W12r": "lists of schedules over HTTP, without schedules",
    "tenants": "jobs of one tenant during a flood of another's jobs",
}
SUMMED_FIGURES = ("lost", "dup", "early", "not_completed")


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, the sum of each count of errors, and the first error of a run."""
    valid = [run for run in runs if "error" not in run]
    figures: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in valid for name in run):
        values = [run[name] for run in valid if run.get(name) is not None]
        if name in SUMMED_FIGURES:
            figures[name] = sum(values)
        elif values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            figures[name] = median(values)
        elif values:
            figures[name] = any(values) if isinstance(values[0], bool) else values[0]
    errors = [run["error"] for run in runs if "error" in run]
    return figures | ({"error": errors[0]} if errors else {})


def workload_table(workload: str, cells: Sequence[dict[str, Any]]) -> str:
    """Return the cells of one workload as text."""
    return f"{workload}  {TITLES[workload]}\n\n{format_table(workload_lines(workload, cells))}"


def workload_lines(workload: str, cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the header and a line for each cell {system, store, processes, median} of a workload.

    The line of a cell without figures has only its label and the error.
    """
    columns = COLUMNS[workload]
    heading = ["", "jobs", *(title for _, title, _ in columns), "lost/dup/early", "foreign cores"]
    lines = [heading]
    for cell in cells:
        figures = cell["median"]
        label = f"{cell['system']}, {cell['store']}, {cell['processes']} process{'es'[: 2 * (cell['processes'] > 1)]}"
        if "jobs" not in figures:
            lines.append([label, figures.get("error", "not run")])
            continue
        cells_text = [_with_ratio(figures.get(name), _best(cell, cells, name, more), more) for name, _, more in columns]
        lines.append(
            [
                label,
                format_number(figures["jobs"]),
                *cells_text,
                _format_errors(figures),
                format_number(figures["foreign_cores"]),
            ]
        )
    return lines


def _best(cell: dict[str, Any], cells: Sequence[dict[str, Any]], name: str, more: bool | None) -> float | None:
    """Return the best figure of the peers with the same number of processes, to compare Timebell with; else None."""
    comparable = (each for each in cells if each["system"] != "Timebell" and each["processes"] == cell["processes"])
    # Figures of runs whose jobs were created late are meaningless.
    medians_ = [each["median"] for each in comparable if not each["median"].get("created_late")]
    values = [figures[name] for figures in medians_ if figures.get(name)]
    return (max if more else min)(values) if values and cell["system"] == "Timebell" else None


def _with_ratio(ours: float | None, peers: float | None, more: bool | None) -> str:
    """Return a figure with its ratio to the best peer (above 1 is better, also if lower values are better)."""
    if not ours or not peers or more is None:
        return format_number(ours)
    return f"{format_number(ours)} ({format_number(ours / peers if more else peers / ours)}x)"


def _format_errors(figures: dict[str, Any]) -> str:
    if "lost" not in figures:
        return "-"
    text = "/".join(str(figures.get(name, 0)) for name in ("lost", "dup", "early"))
    text += f", {figures['not_completed']} not completed" if figures.get("not_completed") else ""
    return text + (", CREATED LATE" if figures.get("created_late") else "")


def next_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of evaluations per second."""
    peers = ("croniter", "cronsim", "dateutil")
    lines = [["expression", "zone", "compiled", "fresh", *peers, *(f"x {peer}" for peer in peers)]]
    for row in rows:
        ratios = [f"{row['compiled'] / row[peer]:.1f}" if row["compiled"] and row[peer] else "-" for peer in peers]
        rates = [format_number(row[name]) for name in ("compiled", "fresh", *peers)]
        lines.append([row["expression"], row["timezone"], *rates, *ratios])
    return f"next  evaluations per second\n\n{format_table(lines)}"


def verbs_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables of statements per verb and of jobs per second, with a column for each store."""
    stores = list(dict.fromkeys(row["store"] for row in rows))
    parts = []
    for name, title in (("statements", "verbs  statements of one call"), ("jobs_s", "verbs  jobs per second")):
        values = {(row["verb"], row["store"]): row[name] for row in rows if name in row}
        lines = [["", *stores]]
        for verb in dict.fromkeys(verb for verb, _ in values):
            lines.append([verb, *(format_number(values[verb, store]) for store in stores)])
        parts.append(f"{title}\n\n{format_table(lines)}")
    return "\n\n".join(parts)


def format_machine(machine: dict[str, Any], server: dict[str, str]) -> str:
    """Return two lines about the machine and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    postgres = f"; PostgreSQL {', '.join(f'{k} {v}' for k, v in server.items())}" if server else ""
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gb']} GB, Linux {machine['kernel']},"
        f" fdatasync {machine['fdatasync_us']} us{postgres}\nPython {machine['python']}, {versions}"
    )


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Align columns, the first to the left; short lines have no figures."""
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(len(line[at]) for line in full) for at in range(len(lines[0]))]
    widths[0] = max(len(line[0]) for line in lines)

    def format_line(line: Sequence[str]) -> str:
        cells = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=False)]
        return "  ".join([line[0].ljust(widths[0]), *cells]).rstrip()

    return "\n".join(map(format_line, lines))


def format_number(value: float | None) -> str:
    """Format with at most three significant digits, or as a whole number from 100 on."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def subset_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argparse type for a comma-separated list of known words."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {','.join(known)}")
        return [each for each in known if each in chosen]

    return parse
