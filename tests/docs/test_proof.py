"""The tables of docs/internals/proof.md are generated from the stored results of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import proof
from tests.model.test_targeted_histories import AIMED
from tests.torture.mutants import MUTANTS

PAGE = "<!-- begin: scripts/proof.py bugs -->\n<!-- end: scripts/proof.py bugs -->\n"


def test_the_page_matches_the_stored_results() -> None:
    page = proof.PAGE.read_text()
    assert proof.render(page, proof.read_results()) == page, "run python -m scripts.proof"
    assert [part[2] for part in proof.PART.finditer(page)] == list(proof.PARTS)


def test_stored_results_are_of_bugs_that_exist() -> None:
    results, names = proof.read_results(), {mutant.name for mutant in MUTANTS}
    assert results["torture"].keys() <= names
    assert results["model"].keys() <= names - AIMED.keys()


def test_every_seeded_bug_is_in_the_table_and_one_without_results_has_dashes() -> None:
    lines = proof.render(PAGE, {}).splitlines()
    for mutant in MUTANTS:
        targeted = (AIMED[mutant.name][1], "1, targeted") if mutant.name in AIMED else ("—", "—")
        assert f"| {mutant.name} | {' | '.join(targeted)} | — |" in lines


def test_results_are_stored_with_their_run_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_commit", lambda: "0123abcd")
    stored, page = tmp_path / "proof.json", tmp_path / "proof.md"
    stored.write_text("{}")
    page.write_text(PAGE)
    proof.record("model", "keys are random", {"rule": "key", "histories": 3}, stored, page)
    proof.record("torture", "keys are random", {"found": ["lost", "early"], "seconds": 7}, stored, page)
    assert "| keys are random | key | 3 | `lost`, `early`, 7 s |" in page.read_text()
    run = json.loads(stored.read_text())["model"]["keys are random"]
    assert f"Random histories: {run['at']}, commit `0123abcd`, {run['cores']} cores." in page.read_text()

    proof.record("model", "keys are random", {"rule": "", "histories": 600}, stored, page)
    monkeypatch.setattr(proof, "_commit", lambda: "")
    proof.record("torture", "keys are random", {"found": [], "seconds": 9}, stored, page)
    assert "| keys are random | not detected | 600 | not detected, 9 s |" in page.read_text()

    proof.record("model", "a retry does not wait", {"rule": "early", "histories": 4}, stored, page)
    assert "commit `" not in page.read_text()  # that of one result is not known
