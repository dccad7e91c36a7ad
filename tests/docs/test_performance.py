"""The page of figures is what the results kept beside the benchmarks come to."""

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


def _keep(folder: Path, file: str, place: int, **median: Any) -> None:
    workload, system, processes = file.split("-")
    kind = table.SYSTEMS[system]
    cell = {"workload": workload, "system": kind.name, "store": kind.store, "processes": int(processes),
            "version": "1.2.3", "place": place, "at": "2026-11-22T00:00:00Z", "median": median}  # fmt: skip
    (folder / f"{file}.json").write_text(json.dumps(cell))


def test_the_page_and_its_pictures_are_those_of_the_kept_results() -> None:
    machine, cells = performance.read(performance.RESULTS)
    page = performance.PAGE.read_text()
    long = performance.others(performance.RESULTS)
    assert performance.rendered(page, machine, cells, long) == page, "run python -m benchmarks.performance"
    drawn = performance.pictures(cells)
    assert {file.name: file.read_text() for file in (DOCS / "img").glob("performance-*.svg")} == drawn
    assert {link for link in links(performance.PAGE) if link.startswith("img/")} == {f"img/{name}" for name in drawn}


def test_what_is_measured_is_shown_with_its_ratio_and_what_was_given_up_is_said(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    sound = {"jobs": 6000, "lost": 0, "dup": 0, "early": 0, "foreign_cores": 0.01}
    _keep(tmp_path, "W3-postgres-1", 1, lag_p50_ms=1.0, lag_p99_ms=2.0, lag_max_ms=3.0, **sound)
    _keep(tmp_path, "W3-pgqueuer-1", 2, lag_p50_ms=50.0, lag_p99_ms=100.0, lag_max_ms=300.0, **sound)
    _keep(tmp_path, "W3-celery-1", 8, error="given up after 200 s")
    _keep(tmp_path, "W1-postgres-1", 1, jobs_s=100_000.0, **sound)
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


def test_a_cell_that_is_there_is_not_measured_again(tmp_path: Path) -> None:
    cells = list(table.planned(["W3", "W6"], ["postgres", "celery", "apscheduler"]))
    named = {cell.file for cell in cells}
    assert named == {f"{one}.json" for one in ("W3-postgres-1", "W3-postgres-2", "W3-apscheduler-1", "W3-celery-1",
                                               "W6-postgres-1", "W6-postgres-2", "W6-celery-1")}  # fmt: skip
    assert all(10 < cell.seconds(Sizes()) < cell.limit(Sizes()) for cell in cells)
    _keep(tmp_path, "W3-postgres-1", 1, jobs=1)
    _keep(tmp_path, "W6-celery-1", 8, error="given up after 200 s")
    _keep(tmp_path, "W3-celery-1", 8, jobs=1, created_late=True)
    _keep(tmp_path, "W3-apscheduler-1", 7, jobs=1, foreign_cores=0.5)
    done = {"W3-postgres-1.json", "W6-celery-1.json", "W3-celery-1.json", "W3-apscheduler-1.json"}
    assert {cell.file for cell in table.left(cells, tmp_path, again=False)} == named - done
    assert {cell.file for cell in table.left(cells, tmp_path, again=True)} == named - {"W3-postgres-1.json"}


def test_what_is_most_wanted_is_measured_first() -> None:
    cells = list(table.planned(table.CHOSEN, [*table.SYSTEMS]))
    strongest = [(name, one) for name, some in table.STRONGEST.items() for one in ("postgres", *some)]
    assert sorted((cell.workload, cell.system) for cell in cells[: len(strongest)]) == sorted(strongest)
    assert all(cell.processes == 1 for cell in cells[: len(strongest)])
    ours = [at for at, cell in enumerate(cells) if cell.system in table.LOADS]
    assert max(ours) < len(cells) / 2
    assert len({cell.file for cell in cells}) == len(cells)


def test_a_long_run_is_kept_and_shown_on_the_page(tmp_path: Path) -> None:
    performance.keep(tmp_path, "plans", ["a node: 90 MB"], [[["", "p99 ms"], ["10,000 pending", "2.5"]]])
    page = (tmp_path / "performance.md").read_text()
    assert "## Ten million pending jobs" in page
    assert "- a node: 90 MB" in page
    assert "| 10,000 pending | 2.5 |" in page
    assert performance.UNMEASURED not in page


def test_a_soak_is_flat_only_if_nothing_grows() -> None:
    level = {"mb": 100.0, "lag_p99_ms": 3.0, "jobs_mb": 40.0, "finished_mb": 300.0}
    assert steady.judged([level] * 20) == []
    assert steady.judged([{**level, "mb": 50.0}] * 4 + [level] * 16) == []  # it warmed up
    for name in level:
        risen = [{**level, name: level[name] * (1 + at)} for at in range(20)]
        assert [fault.split()[0] for fault in steady.judged(risen)] == [name]
