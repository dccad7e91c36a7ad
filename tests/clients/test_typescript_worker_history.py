"""The causes of repeated attempts that `benchmarks/typescript_worker.py` counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.typescript_worker import History, Result


@pytest.mark.parametrize(
    ("lines", "after_worker", "after_node", "without_cause"),
    [
        ("started a 1 w0|killed w0|started a 2 w1", 1, 0, 0),
        ("started a 1 w0|killed node|started a 2 w0", 0, 1, 0),
        ("started a 1 w0|started a 2 w0", 0, 0, 1),
        ("started a 1 w0|killed w1|started a 2 w2", 0, 0, 1),
        ("killed node|started a 1 w0|started a 2 w0", 0, 0, 1),
        ("started a 1 w0|acknowledged a 1 w0|killed w0|started a 2 w1", 0, 0, 1),
        ("started a 1 w0|killed w0|started a 1 w1", 0, 0, 1),
        ("started a 1 w0|acknowledged a 1 w0|killed w0|started b 1 w1", 0, 0, 0),
    ],
)
def test_an_unconfirmed_attempt_may_run_again_only_after_a_kill(
    lines: str, after_worker: int, after_node: int, without_cause: int, tmp_path: Path
) -> None:
    history, result = History(tmp_path / "history.txt"), Result()
    history.path.write_text(lines.replace("|", "\n") + "\n")
    history.read(result)
    assert (result.repeated_after_kill_of_worker, result.repeated_after_kill_of_node) == (after_worker, after_node)
    assert len(result.repeated_without_cause) == without_cause
