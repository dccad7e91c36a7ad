"""The README's table of ratios is computed from the stored results of the benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import performance, ratios


def test_the_readme_shows_the_stored_results() -> None:
    page = ratios.README.read_text()
    cells = performance.load_results(performance.RESULTS)[1]
    assert ratios.render_page(page, cells) == page, "run python -m benchmarks.ratios"


def cell(system: str, workload: str, **median: Any) -> performance.Cell:
    return {"system": system, "workload": workload, "processes": 1, "store": "postgres", "median": median}


@pytest.mark.parametrize(
    ("ours", "theirs", "more_is_better", "expected"),
    [
        ({"jobs_s": 300.0}, {"jobs_s": 200.0}, True, 1.5),
        ({"jobs_s": 2.0}, {"jobs_s": 4.0}, False, 2.0),
        ({"jobs_s": 2.0}, {"jobs_s": 4.0, "lost": 1}, False, None),
        ({"jobs_s": 2.0, "backlog": 1_000_000}, {"jobs_s": 4.0, "backlog": 200_000}, False, None),
        ({"jobs_s": 2.0}, {"error": "given up"}, False, None),
    ],
)
def test_a_ratio_above_one_means_that_timebell_is_better(
    ours: dict[str, Any], theirs: dict[str, Any], more_is_better: bool, expected: float | None
) -> None:
    cells = [cell("Timebell", "W2", **ours), cell("Other", "W2", **theirs)]
    assert ratios.find_ratio(cells, "Other", "W2", "jobs_s", more_is_better) == expected
