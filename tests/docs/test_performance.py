"""The performance page is generated from the stored results of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import performance, steady, table
from benchmarks.workloads import Sizes

from .pages import DOCS, links

MACHINE = {
    "machine": {"cores": 2, "processor": "Some", "memory_gb": 8, "kernel": "6", "fdatasync_us": 90, "python": "3.11"},
    "postgres": {"version": "15", "fsync": "on"}, "sizes": {},
}  # fmt: skip


def _store_cell(folder: Path, file: str, place: int, **median: Any) -> None:
    """Write a result; `file` is "<workload>-<system>-<processes>"."""
    workload, system, processes = file.split("-")
    kind = table.SYSTEMS[system]
    cell = {"workload": workload, "system": kind.name, "store": kind.store, "processes": int(processes),
            "version": "1.2.3", "place": place, "at": "2026-11-22T00:00:00Z", "median": median}  # fmt: skip
    (folder / f"{file}.json").write_text(json.dumps(cell))


def test_the_page_and_its_charts_match_the_stored_results() -> None:
    machine, cells = performance.load_results(performance.RESULTS)
    page = performance.PAGE.read_text()
    long_runs = performance.load_long_runs(performance.RESULTS)
    assert performance.render_page(page, machine, cells, long_runs) == page, "run python -m benchmarks.performance"
    charts = performance.pictures(cells)
    assert {file.name: file.read_text() for file in (DOCS / "img").glob("performance-*.svg")} == charts
    assert {link for link in links(performance.PAGE) if link.startswith("img/")} == {f"img/{name}" for name in charts}


def test_results_are_shown_with_ratios_and_failed_cells_with_their_error(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    counts = {"jobs": 6000, "lost": 0, "dup": 0, "early": 0, "foreign_cores": 0.01}
    _store_cell(tmp_path, "W3-postgres-1", 1, lag_p50_ms=1.0, lag_p99_ms=2.0, lag_max_ms=3.0, **counts)
    _store_cell(tmp_path, "W3-pgqueuer-1", 2, lag_p50_ms=50.0, lag_p99_ms=100.0, lag_max_ms=300.0, **counts)
    _store_cell(tmp_path, "W3-celery-1", 8, error="given up after 200 s")
    _store_cell(tmp_path, "W1-postgres-1", 1, jobs_s=100_000.0, **counts)
    performance.write(tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "2 cores (Some)" in page
    assert "Timebell 1.2.3, PgQueuer 1.2.3" in page
    assert "| Timebell, postgres, 1 process | 6,000 | 1 (50x) | 2 (50x) | 3 (100x) | 0/0/0 | 0.01 |" in page
    assert "| Celery, redis, 1 process | given up after 200 s |" in page
    for name in ("w1", "w3"):
        file = tmp_path / "img" / f"performance-{name}.svg"
        assert f"](img/{file.name})" in page
        texts = [each.text for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
        assert "Timebell, postgres" in texts
        assert "Celery" not in texts


def test_stored_cells_are_not_measured_again(tmp_path: Path) -> None:
    cells = list(table.plan_cells(["W3", "W6"], ["postgres", "celery", "apscheduler"]))
    files = {cell.file for cell in cells}
    assert files == {f"{name}.json" for name in ("W3-postgres-1", "W3-postgres-2", "W3-apscheduler-1", "W3-celery-1",
                                               "W6-postgres-1", "W6-postgres-2", "W6-celery-1")}  # fmt: skip
    assert all(10 < cell.seconds(Sizes()) < cell.limit(Sizes()) for cell in cells)
    _store_cell(tmp_path, "W3-postgres-1", 1, jobs=1)
    _store_cell(tmp_path, "W6-celery-1", 8, error="given up after 200 s")
    _store_cell(tmp_path, "W3-celery-1", 8, jobs=1, created_late=True)
    _store_cell(tmp_path, "W3-apscheduler-1", 7, jobs=1, foreign_cores=0.5)
    done = {"W3-postgres-1.json", "W6-celery-1.json", "W3-celery-1.json", "W3-apscheduler-1.json"}
    assert {cell.file for cell in table.remaining_cells(cells, tmp_path, again=False)} == files - done
    assert {cell.file for cell in table.remaining_cells(cells, tmp_path, again=True)} == files - {"W3-postgres-1.json"}


def test_the_most_relevant_cells_are_measured_first() -> None:
    cells = list(table.plan_cells(table.CHOSEN, [*table.SYSTEMS]))
    strongest = [(workload, system) for workload, peers in table.STRONGEST.items() for system in ("postgres", *peers)]
    assert sorted((cell.workload, cell.system) for cell in cells[: len(strongest)]) == sorted(strongest)
    assert all(cell.processes == 1 for cell in cells[: len(strongest)])
    own_positions = [at for at, cell in enumerate(cells) if cell.system in table.LOADS]
    weaker = (at for at, cell in enumerate(cells) if cell.system not in (*table.LOADS, *table.STRONGEST[cell.workload]))
    assert max(own_positions) < min(weaker)
    assert len({cell.file for cell in cells}) == len(cells)


def test_a_long_run_is_stored_and_shown_on_the_page(tmp_path: Path) -> None:
    performance.save_long_run(tmp_path, "plans", ["a node: 90 MB"], [[["", "p99 ms"], ["10,000 pending", "2.5"]]])
    page = (tmp_path / "performance.md").read_text()
    assert "## Ten million pending jobs" in page
    assert "- a node: 90 MB" in page
    assert "| 10,000 pending | 2.5 |" in page
    assert performance.UNMEASURED not in page


def test_a_soak_run_is_flat_only_if_nothing_grows() -> None:
    level = {"mb": 100.0, "lag_p99_ms": 3.0, "jobs_mb": 40.0, "finished_mb": 300.0}
    assert steady.find_growth([level] * 20) == []
    assert steady.find_growth([{**level, "mb": 50.0}] * 4 + [level] * 16) == []  # the first quarter is warm-up
    for name in level:
        growing = [{**level, name: level[name] * (1 + at)} for at in range(20)]
        assert [problem.split()[0] for problem in steady.find_growth(growing)] == [name]
