"""The ledger of the campaign benchmark detects each broken promise, and knows nothing of Timebell."""

from __future__ import annotations

import ast
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import campaign_ledger, campaign_people

COUNT = 10  # device 7 is a phone without the app

Received = dict[str, list[str]]
Report = dict[str, dict[str, Any]]


def _row(n: int) -> dict[str, Any]:
    if n == 7:
        return {"userId": "", "state": "refused", "code": "UNREGISTERED"}
    return {"userId": f"user-{n}", "state": "accepted", "code": ""}


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., dict[str, int]]:
    """Return a function that compares a correct campaign to COUNT devices after `change(received, report)`."""

    def run(change: Callable[[Received, Report], Any], tier: str | None = None, unanswered: int = 0) -> dict[str, int]:
        people, received_file, report_file = tmp_path / "people", tmp_path / "received", tmp_path / "report"
        campaign_people.write_csv(people, COUNT)
        chosen = [n for n in range(COUNT) if tier is None or n % campaign_people.TIERS == int(tier)]
        received = {campaign_people.device_token(n): ["0:1"] for n in chosen if n != 7}
        report = {str(n): _row(n) for n in chosen}
        change(received, report)
        received_file.write_text(json.dumps(received))
        with report_file.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("userId", "state", "code"))
            writer.writeheader()
            writer.writerows(report.values())
        requests = sum(map(len, received.values())) + sum(row["state"] == "refused" for row in report.values())
        counts = campaign_ledger.compare(people, received_file, report_file, requests + unanswered, tier)
        return {name: counts[name] for name in campaign_ledger.BROKEN_PROMISES if counts[name]}

    return run


def token(n: int) -> str:
    return campaign_people.device_token(n)


@pytest.mark.parametrize("tier", [None, "2"])
def test_a_correct_campaign_breaks_no_promise(compare: Callable[..., dict[str, int]], tier: str | None) -> None:
    assert compare(lambda received, report: None, tier) == {}


def test_an_unknown_result_may_have_arrived_or_not(compare: Callable[..., dict[str, int]]) -> None:
    def leave_unknown(received: Received, report: Report) -> None:
        report["3"]["state"] = report["4"]["state"] = "unknown"
        del received[token(4)]

    assert compare(leave_unknown) == {}


def test_a_message_in_flight_at_a_kill_must_be_unknown(compare: Callable[..., dict[str, int]]) -> None:
    def leave_unknown(received: Received, report: Report) -> None:
        report["3"]["state"] = "unknown"
        del received[token(3)]

    assert compare(leave_unknown, unanswered=1) == {}
    assert compare(leave_unknown, unanswered=2) == {"in_flight_not_unknown": 1}


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        (lambda received, report: received[token(3)].append("0:2"), "twice"),
        (lambda received, report: received.pop(token(3)), "accepted_not_received"),
        (lambda received, report: received.update({"somebody": ["0:9"]}), "strangers"),
        (lambda received, report: received.update({token(7): ["0:9"]}), "strangers"),
        (lambda received, report: report.pop("3"), "unlisted"),
        (lambda received, report: report.update({"again": report["3"]}), "listed_twice"),
        (lambda received, report: report["3"].update(state="refused"), "not_accepted_but_received"),
        (lambda received, report: report["7"].update(userId="user-7"), "gone_not_refused"),
        (lambda received, report: (received.pop(token(3)), report["3"].update(state="unsent")), "missing"),
    ],
)
def test_each_broken_promise_is_detected(
    compare: Callable[..., dict[str, int]], change: Callable[[Received, Report], Any], promise: str
) -> None:
    assert compare(change)[promise] == 1


def test_a_message_to_a_device_outside_the_audience_is_detected(compare: Callable[..., dict[str, int]]) -> None:
    assert compare(lambda received, report: received.update({token(1): ["0:9"]}), "2")["strangers"] == 1


def test_the_ledger_uses_only_the_standard_library() -> None:
    tree = ast.parse(Path(campaign_ledger.__file__).read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
