"""The comparison alone: any damage to any history is found, as what it is and where it is, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from timebell.model import audit
from timebell.model.audit import Comparison
from timebell.model.audit_findings import Counts, Difference, History, Recorded, Revised
from timebell.recurrence import Cron, Every, Override, Recurrence, Spec

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
SPECS: list[Spec] = [Cron("* * * * *"), Cron("*/7 * * * *"), Every("PT90S", START), Cron("0 * * * *")]
SECOND = timedelta(seconds=1)


def bound(spec: Spec, *overrides: Override) -> Recurrence:
    return Recurrence(spec.anchored(START), "Asia/Seoul", overrides=tuple(overrides))


def history(*revisions: tuple[float, Recurrence]) -> History:
    """Each revision from so many minutes after START on."""
    by_number = {number: recurrence for number, (_, recurrence) in enumerate(revisions, 1)}
    made = [Revised(number, START + timedelta(minutes=at)) for number, (at, _) in enumerate(revisions, 1)]
    return History(id="s", name="s", revisions=made, recurrence=by_number.__getitem__)


def row(at: datetime, number: int = 0, **fields: object) -> Recorded:
    return replace(Recorded(f"{at:%H%M%S}-{number}", "planned", at, at, "completed", 1, 1, at, at), **fields)  # type: ignore[arg-type]


def compared(
    of: History, rows: list[Recorded], minutes: float = 300, before: Recorded | None = None
) -> tuple[list[tuple[str, datetime, int]], Counts]:
    """The differences, and the counts, of so many minutes."""
    found: list[Difference] = []
    counts, end = Counts(), START + timedelta(minutes=minutes)
    one = Comparison(of, START, end, end + SECOND, SECOND, counts, found.append)
    rows = sorted(rows, key=lambda each: (each.scheduled_at, each.id))
    while (window := one.window()) is not None:
        first = one.first
        one.take([each for each in rows if window[0] <= each.scheduled_at < window[1]], before if first else None)
    return sorted((each.finding.value, each.at, each.count) for each in found), counts


def grid(spec: Spec, minutes: float = 300) -> list[datetime]:
    return list(bound(spec).between(START + timedelta(microseconds=1), START + timedelta(minutes=minutes)))


@given(st.data())
def test_any_damage_is_found_where_it_is(data: st.DataObject) -> None:
    audit.WINDOW = data.draw(st.sampled_from([1, 2, 3, 7, 1000]))
    try:
        spec = data.draw(st.sampled_from(SPECS))
        instants = grid(spec)
        chosen = data.draw(st.lists(st.sampled_from(instants), unique=True, max_size=8))
        what = {at: data.draw(st.sampled_from(["delete", "double", "shift", "early", "backfill"])) for at in chosen}
        rows, wanted, lost = [], [], set()
        for at in instants:
            match what.get(at):
                case "delete":
                    lost.add(at)
                case "double":
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
        while n < len(instants):  # those in a row are one difference
            run = n
            while run < len(instants) and instants[run] in lost:
                run += 1
            if run > n:
                wanted.append(("missing", instants[n], run - n))
            n = max(run, n + 1)
        found, counts = compared(history((0, bound(spec))), rows)
        assert found == sorted(wanted)
        assert counts.expected == len(instants)
    finally:
        audit.WINDOW = 1000


@given(st.lists(st.tuples(st.integers(0, 290), st.sampled_from(SPECS)), min_size=1, max_size=6))
def test_each_revision_holds_until_the_next(edits: list[tuple[int, Spec]]) -> None:
    edits = sorted(edits, key=lambda one: one[0])
    starts = [START + timedelta(minutes=at) for at, _ in edits]
    rows = []
    for n, (since, (_, spec)) in enumerate(zip(starts, edits, strict=True)):
        until = starts[n + 1] if n + 1 < len(starts) else START + timedelta(minutes=300) - timedelta(microseconds=1)
        held = [at for at in grid(spec) if since < at <= until]
        rows += [row(at, n, revision=n + 1) for at in held]
    of = history(*((at, bound(spec)) for at, spec in edits))
    assert compared(of, rows)[0] == []
    for left in rows[:3]:
        assert compared(of, [one for one in rows if one is not left])[0] == [("missing", left.scheduled_at, 1)]


def test_a_range_row_stands_for_what_is_in_it_but_not_for_what_is_overridden() -> None:
    instants = grid(SPECS[0])
    skipped = bound(SPECS[0], Override(instants[20]))
    ranged = row(instants[10], state="skipped", attempt=0, started_at=None, reason="missed", count=50, to=instants[60])
    own = row(instants[20], state="skipped", attempt=0, started_at=None, reason="override")
    rest = [row(at) for at in instants if not instants[10] <= at <= instants[60]]
    found, counts = compared(history((0, skipped)), [ranged, own, *rest])
    assert found == []
    assert (counts.skipped["missed"], counts.skipped["override"]) == (50, 1)
    assert compared(history((0, skipped)), [ranged, *rest])[0] == [("missing", instants[20], 1)]
    wrong = replace(ranged, count=51)
    assert compared(history((0, skipped)), [wrong, own, *rest])[0] == [("miscounted", instants[10], 1)]
    twice = row(instants[30])
    assert compared(history((0, skipped)), [ranged, own, twice, *rest])[0] == [("doubled", instants[30], 1)]


def test_a_range_row_reaches_in_from_before() -> None:
    instants = grid(SPECS[0])
    since = START - timedelta(minutes=10)
    ranged = row(since, state="skipped", attempt=0, started_at=None, reason="paused", count=16, to=instants[4])
    found, counts = compared(history((-20, bound(SPECS[0]))), [row(at) for at in instants[5:]], before=ranged)
    assert (found, counts.skipped["paused"]) == ([], 6)  # from START on


def test_one_that_was_put_off_has_one_outcome() -> None:
    instants = grid(SPECS[3])
    first = row(instants[0], state="cancelled", attempt=0, started_at=None, reason="rescheduled")
    rows = [first, row(instants[0], 1), *(row(at) for at in instants[1:])]
    assert compared(history((0, bound(SPECS[3]))), rows)[0] == []
    assert compared(history((0, bound(SPECS[3]))), [one for one in rows if one.id != f"{instants[0]:%H%M%S}-1"])[0] == [
        ("missing", instants[0], 1)
    ]
