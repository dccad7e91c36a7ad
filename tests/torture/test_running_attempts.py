"""Faults that need running work find it in the receiver's ledger."""

from __future__ import annotations

from pathlib import Path

from timebell_torture.ledger import Ledger, RunningAttempts


def test_attempts_run_until_their_reply(tmp_path: Path) -> None:
    path = tmp_path / "effect.jsonl"
    ledger = Ledger(path)
    ledger.append_blocking(what="recv", seq=1)  # before it is observed
    attempts = RunningAttempts(path)
    assert attempts.longer_than(0) == set()
    ledger.append_blocking(what="recv", seq=2)
    ledger.append_blocking(what="recv", seq=3)
    assert attempts.longer_than(0) == {2, 3}
    assert attempts.longer_than(60) == set()
    ledger.append_blocking(what="reply", seq=2)
    with path.open("a") as file:
        file.write('{"what":"recv","se')  # a line that is being written
    assert attempts.longer_than(0) == {3}
