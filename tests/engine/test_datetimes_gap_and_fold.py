"""One-time jobs at local times in a gap or a fold: resolved and reported, or refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from timebell import JobSpec
from timebell.errors import InvalidInput

from .world import World, virtual

NEW_YORK = "America/New_York"
GAP, FOLD = datetime(2027, 3, 14, 2, 30), datetime(2027, 11, 7, 1, 30)


@pytest.mark.parametrize(
    ("run_at", "options", "at", "adjusted"),
    [
        (GAP, {}, "2027-03-14T07:30", "gap"),
        (GAP.replace(fold=1), {}, "2027-03-14T07:30", "gap"),
        ("2027-03-14T02:30:00", {"on_gap": "shift"}, "2027-03-14T07:30", "gap"),
        (FOLD, {}, "2027-11-07T05:30", "fold"),
        ("2027-11-07T01:30", {"on_fold": "first"}, "2027-11-07T05:30", "fold"),
        (FOLD.replace(fold=1), {}, "2027-11-07T06:30", None),
        (FOLD.replace(fold=1), {"on_fold": "error"}, "2027-11-07T06:30", None),
        (FOLD.replace(hour=3), {"on_gap": "error", "on_fold": "error"}, "2027-11-07T08:30", None),
        (GAP.replace(hour=3), {"on_gap": "error"}, "2027-03-14T07:30", None),
        (FOLD.replace(hour=3, fold=1), {}, "2027-11-07T08:30", None),
        ("2027-11-07T01:30:00-05:00", {"on_fold": "error"}, "2027-11-07T06:30", None),
        (GAP.replace(tzinfo=ZoneInfo(NEW_YORK)), {"on_gap": "error"}, "2027-03-14T07:30", None),
        (None, {"on_gap": "error", "on_fold": "error"}, "2027-03-01T12:00", None),
    ],
)
@virtual
async def test_a_local_time_is_resolved_and_the_adjustment_reported(
    world: World, run_at: Any, options: dict[str, Any], at: str, adjusted: str | None
) -> None:
    app = world.app()
    (many,) = await app.schedule_many([JobSpec(topic="t", run_at=run_at, timezone=NEW_YORK, **options)])
    made = await app.schedule_at("t", run_at, timezone=NEW_YORK, **options)
    assert (made.run_at, made.adjusted) == (many.run_at, many.adjusted)
    assert (made.run_at, made.adjusted) == (datetime.fromisoformat(at).replace(tzinfo=UTC), adjusted)
    found = await app.get(made.id)
    assert (found.run_at, found.adjusted) == (made.run_at, None)
    if not options:
        moved = await app.reschedule(made.id, run_at, timezone=NEW_YORK)
        assert (moved.run_at, moved.adjusted) == (made.run_at, adjusted)


@pytest.mark.parametrize(
    ("run_at", "timezone", "options", "code", "message"),
    [
        (
            GAP, NEW_YORK, {"on_gap": "error"}, "RUN_AT_IN_GAP",
            "02:30 does not exist on Sun 14 Mar 2027 in America/New_York. Write 03:30 (EDT) or 01:30 (EST).",
        ),
        (
            "2027-03-14T02:30:15", NEW_YORK, {"on_gap": "error"}, "RUN_AT_IN_GAP",
            "02:30:15 does not exist on Sun 14 Mar 2027 in America/New_York. Write 03:30:15 (EDT) or 01:30:15 (EST).",
        ),
        (
            datetime(2027, 10, 3, 2, 15), "Australia/Lord_Howe", {"on_gap": "error"}, "RUN_AT_IN_GAP",
            "02:15 does not exist on Sun 3 Oct 2027 in Australia/Lord_Howe. Write 02:45 (+11) or 01:45 (+1030).",
        ),
        (
            datetime(2027, 9, 5, 0, 30), "America/Santiago", {"on_gap": "error"}, "RUN_AT_IN_GAP",
            "00:30 does not exist on Sun 5 Sep 2027 in America/Santiago."
            " Write 01:30 (-03) or 23:30 on Sat 4 Sep 2027 (-04).",
        ),
        (
            FOLD, NEW_YORK, {"on_fold": "error"}, "RUN_AT_AMBIGUOUS",
            "01:30 happens twice on Sun 7 Nov 2027 in America/New_York."
            " Write 2027-11-07T01:30:00-04:00 (EDT) or 2027-11-07T01:30:00-05:00 (EST);"
            " fold=1 in a datetime selects the second.",
        ),
    ],
)  # fmt: skip
@virtual
async def test_on_gap_error_and_on_fold_error_state_both_readings_and_nothing_is_written(
    world: World, run_at: Any, timezone: str, options: dict[str, Any], code: str, message: str
) -> None:
    app = world.app()
    good = JobSpec(topic="t")
    with pytest.raises(InvalidInput) as refused:
        await app.schedule_many([good, JobSpec(topic="t", run_at=run_at, timezone=timezone, **options)])
    assert refused.value.code == code
    assert str(refused.value) == message
    assert (await app.list()).items == []
