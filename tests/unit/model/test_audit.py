"""The audit comparison finds each damaged occurrence of a history, with its kind and instant, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from timebell.model import audit
from timebell.model.audit import ScheduleAudit
from timebell.model.audit_findings import AuditCounts, Difference, RecordedJob, RevisionStart, ScheduleHistory
from timebell.recurrence import Cron, Every, Override, Recurrence, Spec

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
SPECS: list[Spec] = [Cron("* * * * *"), Cron("*/7 * * * *"), Every("PT90S", START), Cron("0 * * * *")]
SECOND = timedelta(seconds=1)


def bound(spec: Spec, *overrides: Override) -> Recurrence:
    return Recurrence(spec.with_anchor(START), "Asia/Seoul", overrides=tuple(overrides))


def history(*revisions: tuple[float, Recurrence]) -> ScheduleHistory:
    """A history in which each revision starts the given number of minutes after START."""
    by_number = {number: recurrence for number, (_, recurrence) in enumerate(revisions, 1)}
    starts_of_revisions = [
        RevisionStart(number, START + timedelta(minutes=at)) for number, (at, _) in enumerate(revisions, 1)
    ]
    return ScheduleHistory(id="s", name="s", revisions=starts_of_revisions, load_recurrence=by_number.__getitem__)


def row(at: datetime, number: int = 0, **fields: object) -> RecordedJob:
    return replace(RecordedJob(f"{at:%H%M%S}-{number}", "planned", at, at, "completed", 1, 1, at, at), **fields)  # type: ignore[arg-type]


def compare(
    audited: ScheduleHistory, rows: list[RecordedJob], minutes: float = 300, before: RecordedJob | None = None
) -> tuple[list[tuple[str, datetime, int]], AuditCounts]:
    """Audit the first `minutes` after START and return the differences and the counts."""
    found: list[Difference] = []
    counts, end = AuditCounts(), START + timedelta(minutes=minutes)
    one = ScheduleAudit(audited, START, end, end + SECOND, SECOND, counts, found.append)
    rows = sorted(rows, key=lambda each: (each.scheduled_at, each.id))
    while (window := one.next_window()) is not None:
        first = one.is_first_window
        one.compare_rows(
            [each for each in rows if window[0] <= each.scheduled_at < window[1]], before if first else None
        )
    return sorted((each.finding.value, each.at, each.count) for each in found), counts


def grid(spec: Spec, minutes: float = 300) -> list[datetime]:
    return list(bound(spec).between(START + timedelta(microseconds=1), START + timedelta(minutes=minutes)))


@given(st.data())
def test_every_kind_of_damage_is_found_at_its_instant(data: st.DataObject) -> None:
    audit.WINDOW_SIZE = data.draw(st.sampled_from([1, 2, 3, 7, 1000]))
    try:
        spec = data.draw(st.sampled_from(SPECS))
        instants = grid(spec)
        chosen = data.draw(st.lists(st.sampled_from(instants), unique=True, max_size=8))
        damage = {
            at: data.draw(st.sampled_from(["delete", "duplicate", "shift", "early", "backfill"])) for at in chosen
        }
        rows, wanted, lost = [], [], set()
        for at in instants:
            match damage.get(at):
                case "delete":
                    lost.add(at)
                case "duplicate":
                    rows += [row(at), row(at, 1)]
                    wanted.append(("doubled", at, 1))
                case "shift":
                    rows.append(replace(row(at), scheduled_at=at + SECOND, run_at=at, started_at=at + SECOND))
                    wanted.append(("unexpected", at + SECOND, 1))
                    lost.add(at)
                case "early":
                    rows.append(replace(row(at), started_at=at - SECOND))
                    wanted.append(("early", at, 1))
                case "backfill":
                    rows += [row(at), row(at, 1, kind="backfill")]
                    wanted.append(("doubled", at, 1))
                case _:
                    rows.append(row(at))
        n = 0
        while n < len(instants):  # consecutive ones are one difference
            run = n
            while run < len(instants) and instants[run] in lost:
                run += 1
            if run > n:
                wanted.append(("missing", instants[n], run - n))
            n = max(run, n + 1)
        found, counts = compare(history((0, bound(spec))), rows)
        assert found == sorted(wanted)
        assert counts.expected == len(instants)
    finally:
        audit.WINDOW_SIZE = 1000


@given(st.lists(st.tuples(st.integers(0, 290), st.sampled_from(SPECS)), min_size=1, max_size=6))
def test_each_revision_applies_until_the_next(edits: list[tuple[int, Spec]]) -> None:
    edits = sorted(edits, key=lambda one: one[0])
    starts = [START + timedelta(minutes=at) for at, _ in edits]
    rows = []
    for n, (since, (_, spec)) in enumerate(zip(starts, edits, strict=True)):
        until = starts[n + 1] if n + 1 < len(starts) else START + timedelta(minutes=300) - timedelta(microseconds=1)
        instants_in_effect = [at for at in grid(spec) if since < at <= until]
        rows += [row(at, n, revision=n + 1) for at in instants_in_effect]
    audited = history(*((at, bound(spec)) for at, spec in edits))
    assert compare(audited, rows)[0] == []
    for removed in rows[:3]:
        assert compare(audited, [one for one in rows if one is not removed])[0] == [
            ("missing", removed.scheduled_at, 1)
        ]


def test_range_row_accounts_for_its_instants_except_overridden_ones() -> None:
    instants = grid(SPECS[0])
    skipped = bound(SPECS[0], Override(instants[20]))
    ranged = row(
        instants[10], state="skipped", attempt=0, started_at=None, reason="missed", count=50, range_end=instants[60]
    )
    overridden_row = row(instants[20], state="skipped", attempt=0, started_at=None, reason="override")
    rest = [row(at) for at in instants if not instants[10] <= at <= instants[60]]
    found, counts = compare(history((0, skipped)), [ranged, overridden_row, *rest])
    assert found == []
    assert (counts.skipped["missed"], counts.skipped["override"]) == (50, 1)
    assert compare(history((0, skipped)), [ranged, *rest])[0] == [("missing", instants[20], 1)]
    wrong = replace(ranged, count=51)
    assert compare(history((0, skipped)), [wrong, overridden_row, *rest])[0] == [("miscounted", instants[10], 1)]
    twice = row(instants[30])
    assert compare(history((0, skipped)), [ranged, overridden_row, twice, *rest])[0] == [("doubled", instants[30], 1)]


def test_range_row_may_begin_before_the_audited_period() -> None:
    instants = grid(SPECS[0])
    since = START - timedelta(minutes=10)
    ranged = row(since, state="skipped", attempt=0, started_at=None, reason="paused", count=16, range_end=instants[4])
    found, counts = compare(history((-20, bound(SPECS[0]))), [row(at) for at in instants[5:]], before=ranged)
    assert (found, counts.skipped["paused"]) == ([], 6)  # from START on


def test_rescheduled_occurrence_has_one_outcome() -> None:
    instants = grid(SPECS[3])
    first = row(instants[0], state="cancelled", attempt=0, started_at=None, reason="rescheduled")
    rows = [first, row(instants[0], 1), *(row(at) for at in instants[1:])]
    assert compare(history((0, bound(SPECS[3]))), rows)[0] == []
    assert compare(history((0, bound(SPECS[3]))), [one for one in rows if one.id != f"{instants[0]:%H%M%S}-1"])[0] == [
        ("missing", instants[0], 1)
    ]


def test_an_audit_of_nothing_counts_nothing() -> None:
    counts = AuditCounts()
    assert set(counts.totals().values()) == {0}
    assert (counts.skipped, counts.found) == (Counter(), Counter())
