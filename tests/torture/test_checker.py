"""The checker of `timebell torture`: it finds what is wrong, is silent when nothing is, and its arithmetic holds."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import permutations
from random import Random

import pytest

from timebell.recurrence import Cron, Every, RRule
from timebell.torture import oracle, selftest, synthetic, workload
from timebell.torture.windows import Down, common, match, merge


def test_every_violation_planted_is_found_and_clean_histories_raise_no_alarm() -> None:
    result = selftest.run(seed=7, plantings=3, histories=100)
    assert result.alarms == []
    assert result.found == result.planted
    assert set(result.planted.values()) == {3}
    assert result.passed


def test_a_checker_that_looks_away_fails_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timebell.torture.verdicts.Check._twice", lambda *_: None)
    result = selftest.run(seed=7, plantings=1, histories=1)
    assert not result.passed
    assert result.found["dup-unjustified"] == 0


@pytest.mark.parametrize("seed", range(60))
def test_earliest_deadline_first_is_a_maximum_matching(seed: int) -> None:
    chance = Random(seed)
    targets = [(at := chance.uniform(0, 10), at + chance.uniform(0, 3)) for _ in range(chance.randrange(1, 6))]
    hits = [chance.uniform(0, 12) for _ in range(chance.randrange(6))]
    padded = [*hits, *[-1.0] * len(targets)]
    best = max(
        sum(a <= hit <= b for (a, b), hit in zip(targets, order, strict=False))
        for order in set(permutations(padded, len(targets)))
    )
    assert match(targets, hits) == best


@pytest.mark.parametrize("seed", range(20))
def test_a_deadline_is_when_the_able_time_is_over(seed: int) -> None:
    chance = Random(seed)
    down = Down([(at := chance.uniform(0, 50), at + chance.uniform(0, 5)) for _ in range(10)])
    for _ in range(20):
        start, able = chance.uniform(0, 50), chance.uniform(0.01, 30)
        assert down.able(start, down.deadline(start, able)) == pytest.approx(able)


def test_windows() -> None:
    assert merge([(3, 4), (1, 2), (2, 3.5)]) == [(1, 4)]
    assert common([[(0, 5)], [(1, 3), (4, 9)]]) == [(1, 3), (4, 5)]
    assert common([]) == []


def test_the_oracle_and_the_product_agree() -> None:
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
    for spec, plain in cases:
        bound = spec.bind("Asia/Kathmandu", created_at=start, key="k")
        ours = [int(at.timestamp()) for at in bound.between(start, datetime.fromtimestamp(first + 1200, UTC))]
        assert ours == oracle.instants(plain, first, first + 1200), plain
        assert ours
    offset = {"kind": "interval", "every": 13, "anchor": first, "ms": 250}
    bound = workload.spec(offset).bind("UTC", created_at=start, key="k")
    found = list(bound.between(start, datetime.fromtimestamp(first + 1200, UTC)))
    assert [at.timestamp() - 0.25 for at in found] == oracle.instants(offset, first, first + 1199)


def test_what_the_kernel_kept_waiting_is_nobodys_lateness() -> None:
    ledgers = synthetic.clean(Random(5))
    bed = selftest.Bed(ledgers, Random(5))
    effect = next(bed.quiet(serial=False))
    bed.shift(effect, 3)
    assert selftest.judge(selftest.read(ledgers)).counts["late"] == 1
    due = bed.history.began + int(bed.history.due(effect.due_us) * 1e9)
    for number in range(20):
        start = due + number * 2 * 10**8
        ledgers.faults.append({
            "kind": "starved", "target": "n1", "start_mono": start, "end_mono": start + 2 * 10**8,
            "verified_start": True, "verified_end": True, "detail": 0.19,
        })  # fmt: skip
    assert selftest.judge(selftest.read(ledgers)).counts["late"] == 0


def test_a_fault_that_did_not_bite_explains_nothing() -> None:
    ledgers = synthetic.clean(Random(6))
    bed = selftest.Bed(ledgers, Random(6))
    effect = next(bed.quiet())
    bed.again(effect, 5)
    fault = {
        "kind": "kill", "target": effect.node, "start_mono": bed.line(effect.seq)["mono"],
        "end_mono": bed.line(effect.seq)["mono"] + 10**9, "verified_start": False, "verified_end": True,
    }  # fmt: skip
    ledgers.faults.append(fault)
    assert selftest.judge(selftest.read(ledgers)).counts["dup-unjustified"] == 1
    fault["verified_start"] = True
    assert selftest.judge(selftest.read(ledgers)).counts["dup-unjustified"] == 0


def test_due_instants_follow_the_clock_of_the_database() -> None:
    history = selftest.read(synthetic.clean(Random(7)))
    (step,) = history.steps
    for ahead, inside, expected in ((3.0, 4.0, 1.0), (3.0, 1.0, 0.0), (-3.0, 4.0, 7.0), (-3.0, 7.5, 8.0)):
        step.detail = ahead
        due_us = int((history.began_wall / 1e9 + step.start + inside) * 1e6)
        assert history.due(due_us) - step.start == pytest.approx(expected, abs=1e-3)
    assert history.unsure(step.start - 60) == 0


@pytest.mark.parametrize(
    ("wrong", "by", "lost"),
    [
        (((-20.0, -4.014, 4.0), (-0.01, 12.0, -3.0)), -4.0, False),  # by the first, which had just ended
        (((-20.0, -4.014, 4.0), (-0.01, 12.0, -3.0)), -5.0, True),
        (((-0.01, 12.0, -3.0),), -2.0, True),
    ],
)
def test_what_comes_early_comes_by_a_clock_that_was_ahead(
    wrong: tuple[tuple[float, float, float], ...], by: float, lost: bool
) -> None:
    ledgers = synthetic.clean(Random(13))
    bed = selftest.Bed(ledgers, Random(13))
    effect = next(one for one in bed.quiet(serial=False) if one.label == "each-4")
    due = bed.history.began + int(bed.history.true(effect.due_us) * 1e9)
    for start, end, ahead in wrong:
        ledgers.faults.append({
            "kind": "dbclock", "target": "store", "start_mono": due + int(start * 1e9),
            "end_mono": due + int(end * 1e9), "verified_start": True, "verified_end": True, "detail": ahead,
        })  # fmt: skip
    bed.shift(effect, by)
    found = {one.name for one in selftest.judge(selftest.read(ledgers)).violations if one.label == effect.label}
    assert found == ({"early", "lost-unkeyed"} if lost else set())


def test_a_fault_of_another_node_excuses_no_overlap() -> None:
    ledgers = synthetic.clean(Random(8))
    bed = selftest.Bed(ledgers, Random(8))
    first, second = next(bed.pairs("skip", "queue"))
    bed.line(first.seq, "reply")["mono"] = bed.line(second.seq)["mono"] + 10**7
    other = next(name for name in synthetic.NODES if name not in (first.node, second.node))
    fault = {
        "kind": "freeze", "target": other, "start_mono": bed.line(first.seq)["mono"],
        "end_mono": bed.line(second.seq)["mono"], "verified_start": True, "verified_end": True,
    }  # fmt: skip
    ledgers.faults.append(fault)
    assert selftest.judge(selftest.read(ledgers)).counts["overlap"] == 1
    fault["target"] = first.node
    assert selftest.judge(selftest.read(ledgers)).counts["overlap"] == 0


def test_what_was_seen_has_a_record_also_where_it_need_not_have_been() -> None:
    ledgers = synthetic.clean(Random(9))
    bed = selftest.Bed(ledgers, Random(9))
    seen = bed.history.by_occurrence
    label, kind, due_us = next(key for key, one in bed.check.expected.items() if one.word == "may" and key in seen)
    before = selftest.judge(selftest.read(ledgers)).counts["accounting"]
    ledgers.records[:] = [
        one for one in ledgers.records
        if (one.get("label"), one.get("kind"), one.get("due_us")) != (label, kind, due_us)
    ]  # fmt: skip
    assert before == 0
    assert selftest.judge(selftest.read(ledgers)).counts["accounting"] == 1


def test_the_only_node_may_be_cold_when_it_has_come_back() -> None:
    ledgers = synthetic.clean(Random(10))
    bed = selftest.Bed(ledgers, Random(10))
    effect = next(bed.quiet(serial=False))
    bed.shift(effect, 2)
    due = bed.history.began + int(bed.history.due(effect.due_us) * 1e9)
    ledgers.faults.append({
        "kind": "churn", "target": "n1", "start_mono": due - 3 * 10**9, "end_mono": due, "verified_start": True,
        "verified_end": True,
    })  # fmt: skip

    def late() -> bool:
        found = selftest.judge(selftest.read(ledgers)).violations
        return any((one.name, one.label) == ("late", effect.label) for one in found)

    assert late()
    ledgers.plan["nodes"] = ["n1"]
    assert not late()


def test_a_try_that_a_fault_kept_from_coming_again_did_come() -> None:
    ledgers = synthetic.clean(Random(11))
    bed = selftest.Bed(ledgers, Random(11))
    effect = next(bed.quiet(serial=False))
    line = bed.line(effect.seq)
    line["plan"] = "fail"
    bed.again(effect, 20, plan="ok")
    assert selftest.judge(selftest.read(ledgers)).counts["lost-unkeyed"] == 1
    ledgers.faults.append({
        "kind": "freeze", "target": effect.node, "start_mono": line["mono"] + 3 * 10**9,
        "end_mono": line["mono"] + 19 * 10**9, "verified_start": True, "verified_end": True,
    })  # fmt: skip
    assert selftest.judge(selftest.read(ledgers)).counts["lost-unkeyed"] == 0


def test_what_is_triggered_while_no_node_is_there_comes_before_what_was_due_then() -> None:
    ledgers = synthetic.clean(Random(12))
    bed = selftest.Bed(ledgers, Random(12))
    effect, _ = next(bed.pairs("skip"))
    due = bed.history.due(effect.due_us)
    asked_us, mono = effect.due_us + 3 * 10**6, bed.history.began + int((due + 3) * 1e9)
    manual = {"key": f"{effect.label}.{asked_us}.manual", "due_us": asked_us}
    bed.again(effect, 6, attempt=1, **manual)
    bed.drop(effect)
    for record in list(ledgers.records):
        if record.get("key") == effect.key:
            ledgers.records.append(record | manual | {"kind": "manual", "id": "job-manual"})
            record |= {"state": "skipped", "reason": "overlap"}
    common = {"op": 10**6, "schedule": effect.label, "tenant": effect.tenant, "f": "trigger", "value": None}
    ledgers.intents.append(common | {"what": "invoke", "mono": mono})
    ledgers.intents.append({
        "op": 10**6, "what": "done", "mono": mono + 10**6, "type": "ok", "body": {"due_us": asked_us}
    })  # fmt: skip
    assert selftest.judge(selftest.read(ledgers)).counts["lost"] == 1
    ledgers.faults.append({
        "kind": "dbstop", "target": "store", "start_mono": mono - 4 * 10**9, "end_mono": mono + 2 * 10**9,
        "verified_start": True, "verified_end": True,
    })  # fmt: skip
    assert selftest.judge(selftest.read(ledgers)).counts["lost"] == 0


@pytest.mark.parametrize("how", ["refused", "struck"])
def test_what_had_begun_is_not_tried_again_when_its_schedule_is_deleted(how: str) -> None:
    ledgers = synthetic.clean(Random(13))
    bed = selftest.Bed(ledgers, Random(13))
    effect = next(effect for effect in bed.quiet() if effect.kind == "planned")
    due, line = bed.history.due(effect.due_us), bed.line(effect.seq)
    if how == "refused":
        line["plan"] = "fail"
    else:
        ledgers.effects.remove(bed.line(effect.seq, "reply"))
        ledgers.faults.append({
            "kind": "kill", "target": effect.node, "start_mono": line["mono"] + 2 * 10**9,
            "end_mono": line["mono"] + 5 * 10**9, "verified_start": True, "verified_end": True,
        })  # fmt: skip

    def lost() -> bool:
        found = selftest.judge(selftest.read(ledgers)).violations
        return any((one.name, one.label, one.at) == ("lost", effect.label, due) for one in found)

    assert lost()
    deleted = {"op": 10**6, "schedule": effect.label, "tenant": effect.tenant, "f": "delete", "value": None}
    deleted |= {"what": "invoke", "mono": line["mono"] + 60 * 10**9}
    done = {"op": 10**6, "what": "done", "mono": line["mono"] + 61 * 10**9, "type": "ok", "body": None}
    ledgers.intents += [deleted, done]
    assert lost()  # it should have been tried again long before
    deleted["mono"], done["mono"] = line["mono"] + 9 * 10**8, line["mono"] + 10**9
    assert not lost()


def test_how_long_the_database_took_to_be_back_is_not_of_what_was_made_late_or_of_a_node_struck_then() -> None:
    ledgers = synthetic.clean(Random(14))
    bed = selftest.Bed(ledgers, Random(14))
    effect = next(effect for effect in bed.quiet(serial=False) if effect.kind == "once")
    mono = bed.history.began + int(bed.history.due(effect.due_us) * 1e9)
    bed.shift(effect, 4.5)
    was = {"verified_start": True, "verified_end": True}
    ledgers.faults.append({
        "kind": "dbstop", "target": "store", "start_mono": mono - 10**9, "end_mono": mono + 10**9, **was
    })  # fmt: skip

    def back() -> float:
        return max(selftest.judge(selftest.read(ledgers)).recovery["store"])

    took = back()
    assert took == pytest.approx(3.5, abs=0.2)
    asked = {line["op"] for line in ledgers.intents if line.get("schedule") == effect.label and line["f"] == "create"}
    done = [line for line in ledgers.intents if line["op"] in asked and line["what"] == "done"]
    before = [line["mono"] for line in done]
    for line in done:
        line["mono"] = mono + 4 * 10**9
    assert back() == pytest.approx(0.5, abs=0.2)
    for line, at in zip(done, before, strict=True):
        line["mono"] = at
    assert back() == took
    ledgers.faults.append({
        "kind": "cut", "target": effect.node, "start_mono": mono + 2 * 10**9, "end_mono": mono + 4 * 10**9, **was
    })  # fmt: skip
    assert back() < 3
