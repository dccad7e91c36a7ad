"""Results of long runs, stored in tests/proof.json, and the parts of docs/internals/proof.md that show them.

The runs are `python -m tests.model.bugs`, `python -m tests.torture.bugs`, `python -m benchmarks.typescript_worker` and
`make fuzz`. `python -m scripts.proof` writes the page again, for example after a change of its tables.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.model.mutants import MUTANTS as MODEL_MUTANTS
from tests.model.test_targeted_histories import AIMED
from tests.torture.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "proof.json"
PAGE = ROOT / "docs" / "internals" / "proof.md"
PART = re.compile(r"(<!-- begin: scripts/proof\.py (\w+) -->\n).*?(<!-- end: scripts/proof\.py \2 -->\n)", re.DOTALL)
WORKER_CONCURRENCY = 50  # of clients/typescript/test/worker.mjs

Result = dict[str, Any]
"""Figures of one run, with its date (`at`), `commit` if it is known, and the number of `cores`."""
Results = dict[str, dict[str, Result]]
"""Results by kind of run and name."""


def read_results(path: Path = RESULTS) -> Results:
    """Return the stored results."""
    results: Results = json.loads(path.read_text())
    return results


def record(kind: str, name: str, figures: Mapping[str, Any], path: Path = RESULTS, page: Path = PAGE) -> None:
    """Store the result of a run that ends now, and write the page."""
    results = read_results(path)
    run = {"at": datetime.now(UTC).date().isoformat(), "commit": _commit(), "cores": os.cpu_count()}
    results.setdefault(kind, {})[name] = {**figures, **run}
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    page.write_text(render(page.read_text(), results))


def _commit() -> str:
    """Return the commit of the source tree, or an empty string without git."""
    command = [shutil.which("git") or "git", "rev-parse", "--short=8", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def render(page: str, results: Results) -> str:
    """Return the page with these results between its markers."""
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]](results)}\n\n{part[3]}", page)


def _bugs(results: Results) -> str:
    model, torture = results.get("model", {}), results.get("torture", {})
    rows = [(one.name, *_model_cells(one.name, model), _torture_cell(torture.get(one.name))) for one in MUTANTS]
    shown = [model[one.name] for one in MODEL_MUTANTS if one.name in model and one.name not in AIMED]
    return "\n\n".join((
        _table(("bug", "detected as", "histories until then", "by torture, as"), rows),
        f"Random histories: {_describe_runs(shown)}. Torture: {_describe_runs(torture.values())}.",
    ))  # fmt: skip


def _model_cells(bug: str, model: Mapping[str, Result]) -> tuple[str, str]:
    if bug in AIMED:
        return AIMED[bug][1], "1, targeted"
    if bug not in model:
        return "—", "—"
    return model[bug]["rule"] or "not detected", str(model[bug]["histories"])


def _torture_cell(result: Result | None) -> str:
    if result is None:
        return "—"
    return f"{_codes(result['found']) or 'not detected'}, {result['seconds']} s"


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _requests(results: Results) -> str:
    requests = results.get("api requests", {})
    rows = [(name, f"{one['requests']:,}", f"{one['checks']:,}") for name, one in requests.items()]
    table = _table(("part", "requests", "checks"), rows)
    return f"{table}\n\nMeasured {_describe_runs(requests.values())}."


def _kills(results: Results) -> str:
    result = results["worker"]["TypeScript"]
    rows = (
        ("jobs", f"{result['jobs']:,}, and {result['scheduled']:,} of the schedule"),
        ("kills", f"{result['kills_of_worker']} of the worker, {result['kills_of_node']} of the node"),
        ("lost: not completed, or completed without having been started", f"{result['lost']:,}"),
        (
            "run again after a kill of the worker",
            f"{result['repeated_after_kill_of_worker']:,} of at most"
            f" {result['kills_of_worker'] * WORKER_CONCURRENCY} that it was running",
        ),
        ("run again after a kill of the node", f"{result['repeated_after_kill_of_node']:,}"),
        ("run again without such a cause", f"{len(result['repeated_without_cause']):,}"),
        ("`timebell audit`", result["audit"]),
        ("duration", f"{result['seconds']:.0f} s"),
    )
    return f"{_table(('count', 'result'), rows)}\n\nMeasured {_describe_runs([result])}."


PARTS = {"bugs": _bugs, "requests": _requests, "kills": _kills}


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |" for row in (header, *rows))
    return "\n".join((head, f"|{'---|' * len(header)}", *lines))


def _describe_runs(results: Iterable[Result]) -> str:
    """Return when, at which commit if they share it, and on which machine the results were measured."""
    results = list(results)
    days = sorted({one["at"] for one in results})
    if not days:
        return "not measured"
    commits = {one["commit"] for one in results}
    cores = sorted({str(one["cores"]) for one in results})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    at = f", commit {_codes(commits)}" if len(commits) == 1 and all(commits) else ""
    return f"{when}{at}, {' or '.join(cores)} cores"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), read_results()))
