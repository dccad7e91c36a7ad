"""`timebell simulate`: schedules run on virtual time, with simulated failures."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from timebell import Arrived, JobSpec
from timebell.recurrence import Cron
from timebell.recurrence.preview import next_fires
from timebell.sim.report import build_report
from timebell.sim.scenario import Outage
from timebell.sim.world import World

from .conftest import Cli

FILE = """
kind: Simulation
nodes: 2
seed: 7
handlers:
  billing.*: {takes: 20m}
  slow.*: {takes: 30s, fails: 20}
outages:
  - {from: "2027-03-14T06:50:00Z", to: "2027-03-14T07:20:00Z"}
---
name: nightly
cronExpression: "30 2 * * *"
timezone: America/New_York
topic: billing.close-day
---
name: quarter
cronExpression: "*/15 * * * *"
timezone: UTC
topic: billing.check
---
name: mail
cronExpression: "0 * * * *"
timezone: UTC
topic: slow.mail
catchUp: {policy: all}
---
kind: Job
topic: slow.once
runAt: 2027-03-13T12:00:00Z
"""
SPAN = ("--from", "2027-03-13", "--to", "2027-03-16")


def simulate(cli: Cli, tmp_path: Path, text: str = FILE, *args: str) -> tuple[int, dict[str, Any]]:
    (tmp_path / "rehearsal.yaml").write_text(text)
    done = cli("simulate", tmp_path / "rehearsal.yaml", *SPAN, *args, "-o", "json")
    return done.code, json.loads(done.out)


def test_example_week_with_an_outage_runs_on_time_or_gives_a_reason(cli: Cli) -> None:
    """Each notification runs inside its minute, or is listed as late with a reason."""
    week = Path(__file__).parents[3] / "examples" / "simulate" / "notification-week.yaml"
    done = cli("simulate", week, "--from", "2027-02-28T23:59:30Z", "--to", "2027-03-07T23:59:30Z")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    table = {line[0]: [int(cell.replace(",", "")) for cell in line[1:4]] for line in lines[1:19]}
    expected, fired, failed = (sum(column) for column in zip(*table.values(), strict=True))
    assert (expected, failed) == (14_276, 0)
    late = [line for line in lines if line[0] == "late"]
    assert f"{fired:,} fired, {expected - fired} skipped, {len(late)} late, 0 schedules not accounted for." in done.out
    assert 0 < len(late) < 5 and all("outage of nodes from 2027-03-03T08:15:20Z" in " ".join(line) for line in late)
    assert "burst  2027-03-01T08:00:00Z  15 schedules start simultaneously" in done.out
    assert "peak  2027-03-01T08:00:00Z  15 starts in the minute" in done.out


def test_every_occurrence_is_accounted_for_and_late_ones_have_a_reason(cli: Cli, tmp_path: Path) -> None:
    code, found = simulate(cli, tmp_path)
    assert code == 0
    assert found["lost"] == []
    lines = {line["name"]: line for line in found["schedules"]}
    assert lines["nightly"]["expected"] == lines["nightly"]["fired"] == 3
    quarter = lines["quarter"]
    assert quarter["skipped"].keys() == {"overlap", "coalesced"}, "20 minutes of work every 15"
    assert quarter["fired"] + quarter["waiting"] + sum(quarter["skipped"].values()) == quarter["expected"] == 287
    assert lines["mail"]["fired"] == lines["mail"]["expected"] == 71
    assert lines["mail"]["retries"] > 5
    assert lines["one-shots"]["fired"] == 1
    assert {(late["schedule"], late["scheduledAt"]) for late in found["late"]} == {
        ("mail", "2027-03-14T07:00:00Z"), ("nightly", "2027-03-14T07:00:00Z"), ("quarter", "2027-03-14T07:15:00Z"),
    }  # fmt: skip
    assert all(late["why"].startswith("outage of nodes from 2027-03-14T06:50:00Z") for late in found["late"])


def test_the_same_seed_gives_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    assert simulate(cli, tmp_path) == simulate(cli, tmp_path)
    assert simulate(cli, tmp_path) != simulate(cli, tmp_path, FILE.replace("seed: 7", "seed: 8"))


def test_late_run_without_a_reason_is_a_difference(cli: Cli, tmp_path: Path) -> None:
    queued = FILE.replace("topic: billing.check", "topic: billing.check\noverlapPolicy: queue")
    code, found = simulate(cli, tmp_path, queued)
    assert code == 7
    assert any(late["why"] is None and late["schedule"] == "quarter" for late in found["late"])
    assert simulate(cli, tmp_path, queued, "--late", "100d")[0] == 0


def test_text_output_lists_totals_peaks_and_bursts(cli: Cli, tmp_path: Path) -> None:
    herd = "\n---\n".join(
        f"name: s{number}\ncronExpression: '0 3 * * *'\ntimezone: UTC\ntopic: t.t" for number in range(12)
    )
    (tmp_path / "herd.yaml").write_text(herd)
    done = cli("simulate", tmp_path / "herd.yaml", *SPAN, "--outage", "2027-03-14T02:00:00Z/2027-03-14T03:00:10Z")
    assert done.code == 0
    assert "36 fired, 0 skipped, 0 late, 0 schedules not accounted for." in done.out
    assert "burst  2027-03-13T03:00:00Z  12 schedules start simultaneously" in done.out
    assert "peak  2027-03-13T03:00:00Z  12 starts in the minute" in done.out


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("nodes: 0", "Nodes is 0"), ("colour: red", "has no field colour"),
        ("handlers: {a: {takes: long}}", "takes is 'long'"),
        ("handlers: {a: {fails: 200}}", "fails is 200"), ("outages: [{from: x, to: y}]", "INVALID_INSTANT"),
        ("outages: [{from: '2027-03-14T01:00:00Z', to: '2027-03-13T01:00:00Z'}]", "must end after its start"),
        ("outages: [{from: '2028-03-14T01:00:00Z', to: '2028-03-15T01:00:00Z'}]", "outside the simulated time"),
    ],
)  # fmt: skip
def test_invalid_scenario_is_refused(cli: Cli, tmp_path: Path, wrong: str, expected: str) -> None:
    (tmp_path / "wrong.yaml").write_text(f"kind: Simulation\n{wrong}\n")
    done = cli("simulate", tmp_path / "wrong.yaml", *SPAN)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err


@pytest.mark.slow
def test_week_of_14276_one_shots_with_an_outage_runs_on_time_or_gives_a_reason() -> None:
    """Each job runs inside its minute, or is listed as late with a reason."""
    start = datetime(2027, 3, 8, tzinfo=UTC)
    end = start + timedelta(days=7)
    down = Outage(start + timedelta(days=3, hours=9), start + timedelta(days=3, hours=9, minutes=7))
    with World(start=start, seed=1, nodes=2) as world:
        app = world.new_app()

        @app.on("notifications.send")
        async def send(event: Arrived) -> None: ...

        async def make() -> None:
            minutes = [(number * 7919) % (7 * 24 * 60 - 1) + 1 for number in range(14_276)]
            await app.schedule_many([
                JobSpec(topic="notifications.send", run_at=start + timedelta(minutes=at), payload=number)
                for number, at in enumerate(minutes)
            ])  # fmt: skip

        world.run(make())
        world.outage(down.start, down.end)
        world.run(world.until(end))
        names: dict[str | None, str] = {None: "notifications"}
        found = build_report(world.history(), names, {None: 14_276}, start, end, timedelta(minutes=1), [down])
    assert found.lost == []
    (line,) = found.lines
    assert (line.fired, line.failed, line.waiting) == (14_276, 0, 0)
    assert found.unexplained == []
    assert found.late_runs
    assert all(down.start <= one.run.scheduled_at < down.end for one in found.late_runs)
    assert max(one.lateness for one in found.late_runs) <= timedelta(minutes=8)


def test_simulation_agrees_with_the_recurrence(cli: Cli, tmp_path: Path) -> None:
    _, found = simulate(cli, tmp_path)
    fires = [run["scheduledAt"] for run in found["runs"] if run["schedule"] == "nightly"]
    recurrence = Cron("30 2 * * *").bind("America/New_York", created_at=datetime(2027, 3, 13, tzinfo=UTC))
    assert fires == [fire["utc"] for fire in next_fires(recurrence, datetime(2027, 3, 13, tzinfo=UTC), 3)]


def test_external_queues_are_simulated(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing would fail, because no server listens on that port."""
    monkeypatch.setenv("TIMEBELL_BROKER_BULLMQ_URL", "redis://127.0.0.1:1/0")
    text = "kind: Job\ntopic: mail\nrunAt: 2027-03-13T12:00:00Z\ntarget: {kind: bullmq, queue: mail}\n"
    code, found = simulate(cli, tmp_path, text)
    assert code == 0
    assert [(run["status"], run["attempt"]) for run in found["runs"]] == [("completed", 1)]
