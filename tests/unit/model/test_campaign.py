"""Campaigns: states, and how local time, quiet hours and throttle determine the timetable."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timebell.errors import Conflict, InvalidInput
from timebell.features.campaigns.model.campaign import (
    CampaignAction,
    CampaignState,
    ExclusionReason,
    QuietHours,
    QuietHoursPolicy,
    RecipientCounts,
    Throttle,
    build_timetable,
    next_state,
)
from timebell.features.campaigns.model.campaign_plan import CampaignPlan, ZoneProgress, next_zone
from timebell.recurrence import resolve_local, zone

NIGHT = QuietHours(time(21), time(8))
SEOUL, MADRID, MEXICO, AUCKLAND = map(zone, ("Asia/Seoul", "Europe/Madrid", "America/Mexico_City", "Pacific/Auckland"))
LORD_HOWE, KATHMANDU, NEW_YORK = map(zone, ("Australia/Lord_Howe", "Asia/Kathmandu", "America/New_York"))
NOW = datetime(2027, 6, 1, tzinfo=UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(f"{text}+00:00")


@pytest.mark.parametrize("state", CampaignState)
@pytest.mark.parametrize("action", CampaignAction)
def test_actions_allowed_in_each_state(state: CampaignState, action: CampaignAction) -> None:
    allowed = {
        "pending": {"edit": "pending", "start": "running", "stop": "stopped"},
        "running": {"pause": "paused", "stop": "stopped", "finish": "completed", "start": "running",
                    "resume": "running"},
        "paused": {"edit": "paused", "resume": "running", "stop": "stopped", "pause": "paused"},
        "stopped": {"retry": "running", "stop": "stopped"},
        "completed": {"retry": "running", "finish": "completed"},
        "partly_sent": {"retry": "running", "finish": "partly_sent"},
        "failed": {"retry": "running", "finish": "failed"},
    }  # fmt: skip
    ended = ("stopped", "completed", "partly_sent", "failed")
    if (action == "delete" and state in ("pending", *ended)) or (action == "archive" and state in ended):
        assert next_state(state, action) == state
        return
    if action in allowed[state]:
        assert next_state(state, action) == allowed[state][action]
    else:
        with pytest.raises(Conflict) as refused:
            next_state(state, action)
        assert refused.value.code == "CAMPAIGN_STATE"


def test_recipient_counts() -> None:
    counts = RecipientCounts(pending=1, accepted=2, refused=3, unknown=4, skipped=5)
    assert counts.total == 15
    assert not counts.is_finished
    assert RecipientCounts(accepted=1).is_finished


@pytest.mark.parametrize(
    ("at", "where", "quiet_until"),
    [
        ("2027-06-01T12:00", SEOUL, "2027-06-01T23:00"),  # 21:00 there: it begins
        ("2027-06-01T11:59", SEOUL, None),
        ("2027-06-01T22:59", SEOUL, "2027-06-01T23:00"),
        ("2027-06-01T23:00", SEOUL, None),  # 08:00 there: it has ended
        ("2027-06-01T22:00", MADRID, "2027-06-02T06:00"),  # midnight there
        ("2027-03-28T00:30", MADRID, "2027-03-28T06:00"),  # a night that is an hour shorter
        ("2027-10-31T00:30", MADRID, "2027-10-31T07:00"),  # an hour longer
        ("2027-06-01T02:15", KATHMANDU, None),  # 08:00
        ("2027-06-01T02:14", KATHMANDU, "2027-06-01T02:15"),
    ],
)
def test_quiet_hours_end_at_their_local_time(at: str, where: object, quiet_until: str | None) -> None:
    assert NIGHT.quiet_until(utc(at), where) == (quiet_until and utc(quiet_until))  # type: ignore[arg-type]


def test_quiet_hours_that_end_in_a_gap_or_fold() -> None:
    """New York skips 02:00 to 03:00 on 14 March 2027 (at 07:00 UTC), and repeats 01:00 to 02:00 on 7 November."""
    gap = QuietHours(time(22), time(2, 30))
    assert gap.quiet_until(utc("2027-03-14T05:00"), NEW_YORK) == utc("2027-03-14T07:00")
    fold = QuietHours(time(22), time(1, 30))
    assert fold.quiet_until(utc("2027-11-07T05:00"), NEW_YORK) == utc("2027-11-07T05:30")
    assert fold.quiet_until(utc("2027-11-07T05:30"), NEW_YORK) is None
    assert fold.quiet_until(utc("2027-11-07T06:10"), NEW_YORK) == utc("2027-11-07T06:30")  # 01:10 once more


def test_local_send_time_is_resolved_in_each_zone() -> None:
    plan = build_timetable({SEOUL: 700, MADRID: 3, MEXICO: 1}, datetime(2027, 6, 2, 9), now=NOW)
    assert [(chunk.zone, chunk.at, chunk.first, chunk.size) for chunk in plan.chunks] == [
        ("Asia/Seoul", utc("2027-06-02T00:00"), 0, 500),
        ("Asia/Seoul", utc("2027-06-02T00:00:02"), 500, 200),
        ("Europe/Madrid", utc("2027-06-02T07:00"), 0, 3),
        ("America/Mexico_City", utc("2027-06-02T15:00"), 0, 1),
    ]
    assert [row[0] for row in plan.zone_summaries()] == ["Asia/Seoul", "Europe/Madrid", "America/Mexico_City"]


def test_one_instant_is_delayed_by_quiet_hours() -> None:
    plan = build_timetable({SEOUL: 1, MADRID: 1, MEXICO: 1}, utc("2027-06-02T14:00"), now=NOW, quiet_hours=NIGHT)
    assert [(chunk.zone, chunk.at) for chunk in plan.chunks] == [
        ("America/Mexico_City", utc("2027-06-02T14:00")),  # 08:00 there; 16:00 in Madrid, 23:00 in Seoul
        ("Europe/Madrid", utc("2027-06-02T14:00:02")),
        ("Asia/Seoul", utc("2027-06-02T23:00")),
    ]


def test_recipients_in_quiet_hours_can_be_excluded() -> None:
    quiet = QuietHours(time(21), time(8), QuietHoursPolicy.SKIP)
    plan = build_timetable({SEOUL: 7, MADRID: 1}, utc("2027-06-02T14:00"), now=NOW, quiet_hours=quiet)
    assert [chunk.zone for chunk in plan.chunks] == ["Europe/Madrid"]
    assert plan.excluded == {("Asia/Seoul", ExclusionReason.QUIET): 7}


def test_a_zone_whose_quiet_hours_end_after_the_expiry_is_excluded() -> None:
    now = utc("2027-06-02T14:00")  # 23:00 in Seoul, 16:00 in Madrid
    plan = CampaignPlan(quiet_hours=NIGHT, expires_at=utc("2027-06-02T22:59"))
    zones = [ZoneProgress("Asia/Seoul", now), ZoneProgress("Europe/Madrid", now)]
    assert next_zone(zones, plan, now) == (zones[1], now)
    assert (zones[0].done, zones[0].why) == (True, ExclusionReason.EXPIRED)


def test_throttled_chunks_pause_for_quiet_hours_while_other_zones_continue() -> None:
    throttle = Throttle(1, timedelta(minutes=20))
    start = utc("2027-06-02T11:30")  # 20:30 in Seoul, 13:30 in Madrid
    plan = build_timetable({SEOUL: 4, MADRID: 2}, start, now=NOW, quiet_hours=NIGHT, throttle=throttle)
    assert [(chunk.zone, f"{chunk.at:%dT%H:%M}") for chunk in plan.chunks] == [
        ("Asia/Seoul", "02T11:30"), ("Asia/Seoul", "02T11:50"),
        ("Europe/Madrid", "02T12:10"), ("Europe/Madrid", "02T12:30"),
        ("Asia/Seoul", "02T23:00"), ("Asia/Seoul", "02T23:20"),
    ]  # fmt: skip


def test_recipients_after_the_end_are_excluded() -> None:
    until = utc("2027-06-02T12:00:03")
    plan = build_timetable({SEOUL: 1_500, MADRID: 1}, utc("2027-06-02T12:00"), now=NOW, until=until)
    assert [(chunk.zone, chunk.size) for chunk in plan.chunks] == [("Asia/Seoul", 500), ("Asia/Seoul", 500)]
    assert plan.excluded == {
        ("Asia/Seoul", ExclusionReason.EXPIRED): 500,
        ("Europe/Madrid", ExclusionReason.EXPIRED): 1,
    }


def test_past_local_time_is_sent_immediately() -> None:
    plan = build_timetable({AUCKLAND: 1, MEXICO: 1}, datetime(2027, 6, 1, 9), now=NOW)
    assert [(chunk.zone, chunk.at) for chunk in plan.chunks] == [
        ("Pacific/Auckland", NOW), ("America/Mexico_City", utc("2027-06-01T15:00")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: QuietHours(time(8), time(8)), "INVALID_QUIET_HOURS"),
        (lambda: QuietHours(time(8, tzinfo=UTC), time(9)), "INVALID_QUIET_HOURS"),
        (lambda: Throttle(0), "INVALID_THROTTLE"),
        (lambda: Throttle(501), "INVALID_THROTTLE"),
        (lambda: Throttle(1, timedelta(-1)), "INVALID_THROTTLE"),
    ],
)
def test_invalid_quiet_hours_and_throttles_are_refused(make: object, code: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        make()  # type: ignore[operator]
    assert refused.value.code == code


ZONES = st.sampled_from([SEOUL, MADRID, MEXICO, AUCKLAND, LORD_HOWE, KATHMANDU, NEW_YORK])
TIMES = st.builds(time, st.integers(0, 23), st.sampled_from([0, 15, 30]))
QUIET = st.none() | st.tuples(TIMES, TIMES, st.sampled_from(QuietHoursPolicy)).filter(
    lambda each: each[0] != each[1]
).map(lambda each: QuietHours(*each))
LOCAL_TIMES = st.datetimes(datetime(2027, 3, 1), datetime(2027, 11, 30))


@settings(max_examples=60)
@given(
    st.dictionaries(ZONES, st.integers(0, 40), max_size=5), LOCAL_TIMES, st.booleans(), LOCAL_TIMES, QUIET,
    st.integers(1, 7), st.sampled_from([0, 2, 1_800, 40_000]), st.none() | st.integers(0, 5 * 86_400),
)  # fmt: skip
def test_every_timetable_respects_quiet_hours_throttle_and_end(
    audience: dict[object, int], when: datetime, absolute: bool, now: datetime, quiet: QuietHours | None, size: int,
    apart: int, lasts: int | None,
) -> None:  # fmt: skip
    now = now.replace(tzinfo=UTC)
    when = when.replace(tzinfo=UTC) if absolute else when
    until = None if lasts is None else now + timedelta(seconds=lasts)
    throttle = Throttle(size, timedelta(seconds=apart))
    plan = build_timetable(audience, when, now=now, quiet_hours=quiet, throttle=throttle, until=until)  # type: ignore[arg-type]
    for where, count in audience.items():  # every recipient is sent to once, in order, or excluded
        name = where.name  # type: ignore[attr-defined]
        mine = [chunk for chunk in plan.chunks if chunk.zone == name]
        ends = [chunk.first + chunk.size for chunk in mine]
        assert [chunk.first for chunk in mine] == [0, *ends[:-1]][: len(mine)]
        out = sum(left for (of, _), left in plan.excluded.items() if of == name)
        assert (ends[-1] if ends else 0) + out == count
    for chunk in plan.chunks:
        where = zone(chunk.zone)
        assert chunk.at >= now
        assert 1 <= chunk.size <= size
        assert quiet is None or quiet.quiet_until(chunk.at, where) is None
        assert until is None or chunk.at <= until
        assert chunk.at >= (when if absolute else resolve_local(when, where)[0])
    assert all(after.at - before.at >= throttle.min_interval for before, after in pairwise(plan.chunks))


@given(st.datetimes(datetime(2027, 1, 1), datetime(2028, 1, 1)), ZONES, TIMES, TIMES)
def test_quiet_hours_end_within_25_hours(at: datetime, where: object, start: time, end: time) -> None:
    if start == end:
        return
    quiet, at = QuietHours(start, end), at.replace(tzinfo=UTC)
    quiet_until = quiet.quiet_until(at, where)  # type: ignore[arg-type]
    if quiet_until is not None:
        assert at < quiet_until <= at + timedelta(hours=25)
        assert quiet.quiet_until(quiet_until - timedelta(microseconds=1), where) is not None  # type: ignore[arg-type]
