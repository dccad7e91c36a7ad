"""The checker of `timebell torture` finds every class of violation, and none in clean histories."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import permutations
from random import Random

import pytest

from timebell.recurrence import Cron, Every, RRule
from timebell_torture import oracle, selftest, synthetic, workload
from timebell_torture.expectations import MAX_RUN_SECONDS, TAKEOVER_SECONDS
from timebell_torture.windows import Downtime, intersect, match_points, merge


def test_every_seeded_violation_is_found_and_clean_histories_raise_no_alarm() -> None:
    result = selftest.run(seed=7, seeds_per_class=3, histories=100)
    assert result.alarms == []
    assert result.found == result.seeded
    assert set(result.seeded.values()) == {3}
    assert result.passed


def test_a_checker_without_a_rule_fails_its_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timebell_torture.rules.HistoryChecker._check_repeated_attempt", lambda *_: None)
    result = selftest.run(seed=7, seeds_per_class=1, histories=1)
    assert not result.passed
    assert result.found["dup-unjustified"] == 0


@pytest.mark.parametrize("seed", range(60))
def test_earliest_deadline_first_is_a_maximum_matching(seed: int) -> None:
    rng = Random(seed)
    targets = [(at := rng.uniform(0, 10), at + rng.uniform(0, 3)) for _ in range(rng.randrange(1, 6))]
    hits = [rng.uniform(0, 12) for _ in range(rng.randrange(6))]
    padded = [*hits, *[-1.0] * len(targets)]
    best = max(
        sum(a <= hit <= b for (a, b), hit in zip(targets, order, strict=False))
        for order in set(permutations(padded, len(targets)))
    )
    assert match_points(targets, hits) == best


@pytest.mark.parametrize("seed", range(20))
def test_the_deadline_is_the_end_of_the_available_time(seed: int) -> None:
    rng = Random(seed)
    down = Downtime([(at := rng.uniform(0, 50), at + rng.uniform(0, 5)) for _ in range(10)])
    for _ in range(20):
        start, available = rng.uniform(0, 50), rng.uniform(0.01, 30)
        assert down.available_seconds(start, down.deadline(start, available)) == pytest.approx(available)


def test_windows_are_merged_and_intersected() -> None:
    assert merge([(3, 4), (1, 2), (2, 3.5)]) == [(1, 4)]
    assert intersect([[(0, 5)], [(1, 3), (4, 9)]]) == [(1, 3), (4, 5)]
    assert intersect([]) == []


def test_the_oracle_and_timebell_agree() -> None:
    start = datetime(2027, 3, 5, 10, 0, tzinfo=UTC)
    first = int(start.timestamp())
    cases = [
        (Cron("*/7 * * * * *"), {"kind": "cron", "expression": "*/7 * * * * *", "timezone": "Asia/Kathmandu"}),
        (Cron("15,45 */2 * * * *"), {"kind": "cron", "expression": "15,45 */2 * * * *", "timezone": "Asia/Kathmandu"}),
        (Cron("0 50 15 5 3 *"), {"kind": "cron", "expression": "0 50 15 5 3 *", "timezone": "Asia/Kathmandu"}),
        (Every("PT13S", anchor=start), {"kind": "interval", "every": 13, "anchor": first}),
        (
            RRule("FREQ=SECONDLY;INTERVAL=11", dtstart=start),
            {"kind": "rrule", "freq": "SECONDLY", "interval": 11, "dtstart": first},
        ),
        (
            RRule("FREQ=MINUTELY;INTERVAL=2;BYSECOND=10,40", dtstart=start),
            {"kind": "rrule", "freq": "MINUTELY", "interval": 2, "dtstart": first, "bysecond": [10, 40]},
        ),
    ]
    for spec, value in cases:
        bound = spec.bind("Asia/Kathmandu", created_at=start, key="k")
        instants = [int(at.timestamp()) for at in bound.between(start, datetime.fromtimestamp(first + 1200, UTC))]
        assert instants == oracle.instants(value, first, first + 1200), value
        assert instants
    offset = {"kind": "interval", "every": 13, "anchor": first, "ms": 250}
    bound = workload.to_spec(offset).bind("UTC", created_at=start, key="k")
    instants = list(bound.between(start, datetime.fromtimestamp(first + 1200, UTC)))
    assert [at.timestamp() - 0.25 for at in instants] == oracle.instants(offset, first, first + 1199)


def test_cpu_starvation_excuses_lateness() -> None:
    ledgers = synthetic.clean_ledgers(Random(5))
    editor = selftest.HistoryEditor(ledgers, Random(5))
    effect = next(editor.undisturbed_effects(serial=False))
    editor.shift_effect(effect, 3)
    assert selftest.check_history(selftest.to_history(ledgers)).counts["late"] == 1
    due = editor.history.began + int(editor.history.due_at(effect.due_us) * 1e9)
    for number in range(20):
        start = due + number * 2 * 10**8
        ledgers.faults.append({
            "kind": "starved", "target": "n1", "start_mono": start, "end_mono": start + 2 * 10**8,
            "verified_start": True, "verified_end": True, "detail": 0.19,
        })  # fmt: skip
    assert selftest.check_history(selftest.to_history(ledgers)).counts["late"] == 0


def test_a_fault_without_effect_excuses_nothing() -> None:
    ledgers = synthetic.clean_ledgers(Random(6))
    editor = selftest.HistoryEditor(ledgers, Random(6))
    effect = next(editor.undisturbed_effects())
    editor.repeat_effect(effect, 5)
    fault = {
        "kind": "kill", "target": effect.node, "start_mono": editor.line(effect.seq)["mono"],
        "end_mono": editor.line(effect.seq)["mono"] + 10**9, "verified_start": False, "verified_end": True,
    }  # fmt: skip
    ledgers.faults.append(fault)
    assert selftest.check_history(selftest.to_history(ledgers)).counts["dup-unjustified"] == 1
    fault["verified_start"] = True
    assert selftest.check_history(selftest.to_history(ledgers)).counts["dup-unjustified"] == 0


def test_due_times_follow_the_clock_of_the_database() -> None:
    history = selftest.to_history(synthetic.clean_ledgers(Random(7)))
    (step,) = history.clock_steps
    for ahead, offset, expected in ((3.0, 4.0, 1.0), (3.0, 1.0, 0.0), (-3.0, 4.0, 7.0), (-3.0, 7.5, 8.0)):
        step.detail = ahead
        due_us = int((history.began_wall / 1e9 + step.start + offset) * 1e6)
        assert history.due_at(due_us) - step.start == pytest.approx(expected, abs=1e-3)
    assert history.clock_uncertainty(step.start - 60) == 0


@pytest.mark.parametrize(
    ("clock_steps", "seconds", "lost"),
    [
        (((-20.0, -4.014, 4.0), (-0.01, 12.0, -3.0)), -4.0, False),  # explained by the first step, which had just ended
        (((-20.0, -4.014, 4.0), (-0.01, 12.0, -3.0)), -5.0, True),
        (((-0.01, 12.0, -3.0),), -2.0, True),
    ],
)
def test_a_clock_that_was_ahead_excuses_early_arrivals(
    clock_steps: tuple[tuple[float, float, float], ...], seconds: float, lost: bool
) -> None:
    ledgers = synthetic.clean_ledgers(Random(13))
    editor = selftest.HistoryEditor(ledgers, Random(13))
    effect = next(candidate for candidate in editor.undisturbed_effects(serial=False) if candidate.label == "each-4")
    due = editor.history.began + int(editor.history.true_due_at(effect.due_us) * 1e9)
    for start, end, ahead in clock_steps:
        ledgers.faults.append({
            "kind": "dbclock", "target": "store", "start_mono": due + int(start * 1e9),
            "end_mono": due + int(end * 1e9), "verified_start": True, "verified_end": True, "detail": ahead,
        })  # fmt: skip
    editor.shift_effect(effect, seconds)
    violations = {
        candidate.name
        for candidate in selftest.check_history(selftest.to_history(ledgers)).violations
        if candidate.label == effect.label
    }
    assert violations == ({"early", "lost-unkeyed"} if lost else set())


def test_a_fault_of_another_node_does_not_excuse_an_overlap() -> None:
    ledgers = synthetic.clean_ledgers(Random(8))
    editor = selftest.HistoryEditor(ledgers, Random(8))
    first, second = next(editor.consecutive_effects("skip", "queue"))
    editor.line(first.seq, "reply")["mono"] = editor.line(second.seq)["mono"] + 10**7
    other = next(name for name in synthetic.NODES if name not in (first.node, second.node))
    fault = {
        "kind": "freeze", "target": other, "start_mono": editor.line(first.seq)["mono"],
        "end_mono": editor.line(second.seq)["mono"], "verified_start": True, "verified_end": True,
    }  # fmt: skip
    ledgers.faults.append(fault)
    assert selftest.check_history(selftest.to_history(ledgers)).counts["overlap"] == 1
    fault["target"] = first.node
    assert selftest.check_history(selftest.to_history(ledgers)).counts["overlap"] == 0


def test_an_optional_occurrence_that_arrived_needs_a_record() -> None:
    ledgers = synthetic.clean_ledgers(Random(9))
    editor = selftest.HistoryEditor(ledgers, Random(9))
    arrived = editor.history.by_occurrence
    label, kind, due_us = next(
        occurrence
        for occurrence, item in editor.check.expected.items()
        if item.requirement == "may" and occurrence in arrived
    )
    before = selftest.check_history(selftest.to_history(ledgers)).counts["accounting"]
    ledgers.records[:] = [
        item for item in ledgers.records
        if (item.get("label"), item.get("kind"), item.get("due_us")) != (label, kind, due_us)
    ]  # fmt: skip
    assert before == 0
    assert selftest.check_history(selftest.to_history(ledgers)).counts["accounting"] == 1


def test_the_only_node_has_a_cold_start_after_it_returns() -> None:
    ledgers = synthetic.clean_ledgers(Random(10))
    editor = selftest.HistoryEditor(ledgers, Random(10))
    effect = next(editor.undisturbed_effects(serial=False))
    editor.shift_effect(effect, 2)
    due = editor.history.began + int(editor.history.due_at(effect.due_us) * 1e9)
    ledgers.faults.append({
        "kind": "churn", "target": "n1", "start_mono": due - 3 * 10**9, "end_mono": due, "verified_start": True,
        "verified_end": True,
    })  # fmt: skip

    def late() -> bool:
        violations = selftest.check_history(selftest.to_history(ledgers)).violations
        return any((violation.name, violation.label) == ("late", effect.label) for violation in violations)

    assert late()
    ledgers.plan["nodes"] = ["n1"]
    assert not late()


def test_remote_workers_may_wait_for_nodes_under_a_fault() -> None:
    ledgers = synthetic.clean_ledgers(Random(10))
    editor = selftest.HistoryEditor(ledgers, Random(10))
    effect = next(effect for effect in editor.undisturbed_effects(serial=False) if effect.kind == "once")
    due, line = editor.history.due_at(effect.due_us), editor.line(effect.seq)
    line |= {"attempt": 2, "node": None, "by": "remote"}
    taken_over_by = due + MAX_RUN_SECONDS + TAKEOVER_SECONDS

    def add_fault(kind: str, node: str, start: float, end: float) -> None:
        ledgers.faults.append({
            "kind": kind, "target": node, "start_mono": editor.history.began + int(start * 1e9),
            "end_mono": editor.history.began + int(end * 1e9), "verified_start": True, "verified_end": True,
        })  # fmt: skip

    def is_late() -> bool:
        violations = selftest.check_history(selftest.to_history(ledgers)).violations
        return any((violation.name, violation.label) == ("late", effect.label) for violation in violations)

    add_fault("kill", "n1", due, due + 3)
    editor.shift_effect(effect, taken_over_by + 5 - effect.at)
    assert is_late()
    add_fault("cut", "n3", taken_over_by - 1, taken_over_by + 9)
    assert not is_late()
    editor.shift_effect(effect, 2)
    assert is_late()


def test_an_attempt_whose_retry_a_fault_delayed_counts_as_an_arrival() -> None:
    ledgers = synthetic.clean_ledgers(Random(11))
    editor = selftest.HistoryEditor(ledgers, Random(11))
    effect = next(effect for effect in editor.undisturbed_effects(serial=False) if effect.kind == "once")
    line = editor.line(effect.seq)
    line["plan"] = "fail"
    editor.repeat_effect(effect, 20, plan="ok")
    assert selftest.check_history(selftest.to_history(ledgers)).counts["lost-unkeyed"] == 1
    ledgers.faults.append({
        "kind": "freeze", "target": effect.node, "start_mono": line["mono"] + 3 * 10**9,
        "end_mono": line["mono"] + 19 * 10**9, "verified_start": True, "verified_end": True,
    })  # fmt: skip
    assert selftest.check_history(selftest.to_history(ledgers)).counts["lost-unkeyed"] == 0


def test_a_trigger_during_downtime_may_precede_an_earlier_due_run() -> None:
    ledgers = synthetic.clean_ledgers(Random(12))
    editor = selftest.HistoryEditor(ledgers, Random(12))
    effect, _ = next(editor.consecutive_effects("skip"))
    due = editor.history.due_at(effect.due_us)
    trigger_us, mono = effect.due_us + 3 * 10**6, editor.history.began + int((due + 3) * 1e9)
    manual = {"key": f"{effect.label}.{trigger_us}.manual", "due_us": trigger_us}
    editor.repeat_effect(effect, 6, attempt=1, **manual)
    editor.remove_effects(effect)
    for record in list(ledgers.records):
        if record.get("key") == effect.key:
            ledgers.records.append(record | manual | {"kind": "manual", "id": "job-manual"})
            record |= {"state": "skipped", "reason": "overlap"}
    common = {"op": 10**6, "schedule": effect.label, "tenant": effect.tenant, "f": "trigger", "value": None}
    ledgers.intents.append(common | {"what": "invoke", "mono": mono})
    ledgers.intents.append({
        "op": 10**6, "what": "done", "mono": mono + 10**6, "type": "ok", "body": {"due_us": trigger_us}
    })  # fmt: skip
    assert selftest.check_history(selftest.to_history(ledgers)).counts["lost"] == 1
    ledgers.faults.append({
        "kind": "dbstop", "target": "store", "start_mono": mono - 4 * 10**9, "end_mono": mono + 2 * 10**9,
        "verified_start": True, "verified_end": True,
    })  # fmt: skip
    assert selftest.check_history(selftest.to_history(ledgers)).counts["lost"] == 0


@pytest.mark.parametrize("cause", ["refused", "interrupted"])
def test_an_interrupted_attempt_is_not_retried_after_its_schedule_was_deleted(cause: str) -> None:
    ledgers = synthetic.clean_ledgers(Random(13))
    editor = selftest.HistoryEditor(ledgers, Random(13))
    effect = next(effect for effect in editor.undisturbed_effects() if effect.kind == "planned")
    due, line = editor.history.due_at(effect.due_us), editor.line(effect.seq)
    if cause == "refused":
        line["plan"] = "fail"
    else:
        ledgers.effects.remove(editor.line(effect.seq, "reply"))
        ledgers.faults.append({
            "kind": "kill", "target": effect.node, "start_mono": line["mono"] + 2 * 10**9,
            "end_mono": line["mono"] + 5 * 10**9, "verified_start": True, "verified_end": True,
        })  # fmt: skip

    def lost() -> bool:
        violations = selftest.check_history(selftest.to_history(ledgers)).violations
        return any(
            (violation.name, violation.label, violation.at) == ("lost", effect.label, due) for violation in violations
        )

    assert lost()
    deleted = {"op": 10**6, "schedule": effect.label, "tenant": effect.tenant, "f": "delete", "value": None}
    deleted |= {"what": "invoke", "mono": line["mono"] + 60 * 10**9}
    done = {"op": 10**6, "what": "done", "mono": line["mono"] + 61 * 10**9, "type": "ok", "body": None}
    ledgers.intents += [deleted, done]
    assert lost()  # its retry was due long before the delete
    deleted["mono"], done["mono"] = line["mono"] + 9 * 10**8, line["mono"] + 10**9
    assert not lost()


def test_store_recovery_excludes_late_creations_and_struck_nodes() -> None:
    ledgers = synthetic.clean_ledgers(Random(14))
    editor = selftest.HistoryEditor(ledgers, Random(14))
    effect = next(effect for effect in editor.undisturbed_effects(serial=False) if effect.kind == "once")
    mono = editor.history.began + int(editor.history.due_at(effect.due_us) * 1e9)
    editor.shift_effect(effect, 4.5)
    verified = {"verified_start": True, "verified_end": True}
    ledgers.faults.append({
        "kind": "dbstop", "target": "store", "start_mono": mono - 10**9, "end_mono": mono + 10**9, **verified
    })  # fmt: skip

    def recovery_seconds() -> float:
        return max(selftest.check_history(selftest.to_history(ledgers)).recovery["store"])

    before_changes = recovery_seconds()
    assert before_changes == pytest.approx(3.5, abs=0.2)
    create_numbers = {
        line["op"] for line in ledgers.intents if line.get("schedule") == effect.label and line["f"] == "create"
    }
    done = [line for line in ledgers.intents if line["op"] in create_numbers and line["what"] == "done"]
    before = [line["mono"] for line in done]
    for line in done:
        line["mono"] = mono + 4 * 10**9
    assert recovery_seconds() == pytest.approx(0.5, abs=0.2)
    for line, at in zip(done, before, strict=True):
        line["mono"] = at
    assert recovery_seconds() == before_changes
    ledgers.faults.append({
        "kind": "cut", "target": effect.node, "start_mono": mono + 2 * 10**9, "end_mono": mono + 4 * 10**9, **verified
    })  # fmt: skip
    assert recovery_seconds() < 3


def test_what_a_failover_lost_is_not_required_but_must_be_reported() -> None:
    ledgers = synthetic.clean_ledgers(Random(21))
    assert selftest.check_history(selftest.to_history(ledgers)).counts.total() == 0
    (fault,) = [line for line in ledgers.faults if line["kind"] == "rewind"]
    ledgers.faults.remove(fault)
    counts = selftest.check_history(selftest.to_history(ledgers)).counts
    assert counts["lost-write"] > 0, "without the fault, the missing jobs are lost writes"
    assert counts["loss-report"] == 1, "and the report is wrong"


@pytest.mark.parametrize(("kind", "duplicates"), [("read-only", 1), ("strand", 1), ("promote", 1), ("dbstop", 0)])
def test_an_outage_that_is_shorter_than_a_lease_explains_no_second_delivery(kind: str, duplicates: int) -> None:
    ledgers = synthetic.clean_ledgers(Random(22))
    editor = selftest.HistoryEditor(ledgers, Random(22))
    effect = next(editor.undisturbed_effects(serial=False))
    mono = editor.line(effect.seq)["mono"]
    ledgers.faults.append({
        "kind": kind, "target": "store", "start_mono": mono - 10**9, "end_mono": mono + 2 * 10**9,
        "verified_start": True, "verified_end": True,
    })  # fmt: skip
    editor.repeat_effect(effect, 18)
    found = selftest.check_history(selftest.to_history(ledgers)).counts["dup-unjustified"]
    assert found == duplicates


@pytest.mark.parametrize(("pause", "duplicates"), [(2, 0), (8, 1)])
def test_outages_that_follow_each_other_for_a_lease_explain_a_second_delivery(pause: int, duplicates: int) -> None:
    ledgers = synthetic.clean_ledgers(Random(22))
    editor = selftest.HistoryEditor(ledgers, Random(22))
    effect = next(editor.undisturbed_effects(serial=False))
    mono = editor.line(effect.seq)["mono"]
    ledgers.faults += [
        {
            "kind": "strand", "target": "store", "start_mono": mono + start * 10**9,
            "end_mono": mono + (start + 6) * 10**9, "verified_start": True, "verified_end": True,
        } for start in (-1, 5 + pause)
    ]  # fmt: skip
    editor.repeat_effect(effect, 18)
    found = selftest.check_history(selftest.to_history(ledgers)).counts["dup-unjustified"]
    assert found == duplicates


@pytest.mark.parametrize(
    ("outage", "killed", "killed_at", "duplicates"),
    [
        ("strand", "its node", 8, 0),
        ("strand", "its node", 14, 1),
        ("strand", "another", 8, 1),
        (None, "its node", 8, 1),
    ],
)
def test_a_node_that_ends_before_it_could_write_a_result_explains_a_second_delivery(
    outage: str | None, killed: str, killed_at: int, duplicates: int
) -> None:
    ledgers = synthetic.clean_ledgers(Random(22))
    editor = selftest.HistoryEditor(ledgers, Random(22))
    effect = next(editor.undisturbed_effects(serial=False))
    mono = editor.line(effect.seq)["mono"]
    node = effect.node if killed == "its node" else next(name for name in synthetic.NODES if name != effect.node)
    faults = [("kill", node, killed_at, killed_at + 1)]
    if outage is not None:
        faults.append((outage, "store", -1, 6))
    ledgers.faults += [
        {
            "kind": kind, "target": target, "start_mono": mono + start * 10**9, "end_mono": mono + end * 10**9,
            "verified_start": True, "verified_end": True,
        } for kind, target, start, end in faults
    ]  # fmt: skip
    editor.repeat_effect(effect, 28)
    found = selftest.check_history(selftest.to_history(ledgers)).counts["dup-unjustified"]
    assert found == duplicates


@pytest.mark.parametrize(("state", "is_late", "violations"), [("running", True, 0), ("running", False, 1)])
def test_a_job_may_end_while_the_records_are_read(state: str, is_late: bool, violations: int) -> None:
    ledgers = synthetic.clean_ledgers(Random(23))
    row = next(record for record in ledgers.records if record["what"] == "row")
    job = next(record for record in ledgers.records if record["what"] == "job" and record["key"] == row["key"])
    job["state"], row["is_late"] = state, is_late
    assert selftest.check_history(selftest.to_history(ledgers)).counts["transaction"] == violations


class Failover:
    """A clean history, in which a failover loses what was written between two times around an effect."""

    def __init__(self) -> None:
        self.ledgers = synthetic.clean_ledgers(Random(25))
        self.editor = selftest.HistoryEditor(self.ledgers, Random(25))
        effects = self.editor.undisturbed_effects(serial=False)
        entities = self.editor.history.entities
        self.effect = next(
            effect for effect in effects
            if effect.kind == "once"
            and all(operation.effective_until < effect.at - 0.6 for operation in entities[effect.label].operations)
        )  # fmt: skip
        self.mono = self.editor.line(self.effect.seq)["mono"]

    def cancel(self, start: float, end: float, outcome: str, attempt: int) -> None:
        """Add a cancel that was acknowledged; times are in seconds after the effect."""
        common = {"op": 10**6, "schedule": self.effect.label, "tenant": self.effect.tenant, "f": "cancel"}
        self.ledgers.intents += [
            common | {"what": "invoke", "value": None, "mono": self.mono + int(start * 10**9)},
            {
                "op": 10**6, "what": "done", "type": "ok", "body": {"outcome": outcome, "attempt": attempt},
                "mono": self.mono + int(end * 10**9),
            },
        ]  # fmt: skip

    def add_fault(self, kind: str, start: float, end: float, detail: float | None = None) -> None:
        self.ledgers.faults.append({
            "kind": kind, "target": "store", "start_mono": self.mono + int(start * 10**9),
            "end_mono": self.mono + int(end * 10**9), "verified_start": True, "verified_end": True, "detail": detail,
        })  # fmt: skip

    def is_found(self, name: str) -> bool:
        return selftest.check_history(selftest.to_history(self.ledgers)).counts[name] > 0


def test_a_cancel_that_a_failover_lost_forbids_nothing() -> None:
    failover = Failover()
    failover.cancel(2.5, 2.7, "prevented", 0)
    failover.editor.shift_effect(failover.effect, 5)
    assert failover.is_found("after-cancel")
    failover.add_fault("rewind", 2.4, 4.5, 1.5)
    assert not failover.is_found("after-cancel")


@pytest.mark.parametrize("repeated_at", [None, 5])
def test_an_attempt_that_a_failover_forgot_may_precede_a_cancel(repeated_at: float | None) -> None:
    failover = Failover()
    failover.cancel(1.5, 1.6, "prevented", 0)
    if repeated_at is not None:
        failover.editor.repeat_effect(failover.effect, repeated_at)
    assert failover.is_found("after-cancel")
    failover.add_fault("rewind", -0.5, 0.8, 0.7)
    assert failover.is_found("after-cancel") == (repeated_at is not None)


def test_a_later_attempt_that_a_failover_forgot_may_precede_a_cancel_in_flight() -> None:
    failover = Failover()
    failover.editor.repeat_effect(failover.effect, 1)
    failover.cancel(2.5, 2.6, "in_flight", 1)
    assert failover.is_found("after-cancel")
    failover.add_fault("rewind", 0.5, 1.8, 1)
    assert not failover.is_found("after-cancel")


def test_the_late_result_of_a_forgotten_attempt_may_end_its_twin() -> None:
    failover = Failover()
    for number, (after, attempt) in enumerate([(0.9, 1), (1.2, 2), (2.5, 1)]):
        failover.editor.repeat_effect(failover.effect, after, attempt=attempt, plan="fail" if number == 0 else "ok")
    failover.editor.line(failover.effect.seq)["plan"] = "fail"
    assert failover.is_found("retry")
    assert failover.is_found("zombie-send")
    failover.add_fault("rewind", -0.3, 0.6, 0.4)
    assert not failover.is_found("retry")
    assert not failover.is_found("zombie-send")


def test_a_result_that_was_written_late_may_be_lost() -> None:
    failover = Failover()
    failover.add_fault("strand", 0.2, 6)
    failover.editor.repeat_effect(failover.effect, 20)
    assert failover.is_found("dup-unjustified")
    failover.add_fault("rewind", 6.5, 9, 1.5)
    assert not failover.is_found("dup-unjustified")


@pytest.mark.parametrize(("waited_until", "is_lost"), [(-5.0, True), (-0.6, False)])
def test_a_failover_may_lose_a_request_for_as_long_as_the_driver_waited(waited_until: float, is_lost: bool) -> None:
    failover = Failover()
    effect = failover.effect
    common = {"op": 10**6, "schedule": effect.label, "tenant": effect.tenant, "f": "create"}
    failover.ledgers.intents += [
        common | {
            "what": "invoke", "value": failover.editor.history.entities[effect.label].value,
            "mono": failover.mono - 14 * 10**9,
        },
        {"op": 10**6, "what": "done", "type": "info", "body": None, "mono": failover.mono + int(waited_until * 10**9)},
    ]  # fmt: skip
    failover.editor.remove_effects(effect)
    assert failover.is_found("lost")
    failover.add_fault("rewind", -0.5, 2, 1)
    assert failover.is_found("lost") == is_lost
