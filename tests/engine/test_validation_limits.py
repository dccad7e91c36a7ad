"""Limits of lengths, depths, frequencies and counts, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cpu import within
from timebell import Cron, Dates, Every, JobSpec, RRule
from timebell.errors import InvalidInput
from timebell.recurrence import parse_interval, spec_from_json

from .world import START, World, after, virtual


def refused(make: Callable[[], Any], code: str) -> None:
    with within(0.5), pytest.raises(InvalidInput) as caught:
        make()
    assert caught.value.code == code
    assert len(str(caught.value)) < 1000


def listed(count: int, most: int) -> str:
    return ",".join(str(n % (most + 1)) for n in range(count))


def test_texts_have_a_maximum_length() -> None:
    assert Cron("0 9 * * *" + " " * 247)
    assert RRule("FREQ=DAILY;UNTIL=20300101T000000Z" + " " * 991)
    for text in ("0 9 * * *" + " " * 248, "0 " * 1_000_000, "*" * 257, "1," * 10_000):
        refused(lambda: Cron(text), "INVALID_CRON")
        refused(lambda: spec_from_json({"kind": "cron", "spec": text}), "INVALID_CRON")
    rule = "FREQ=DAILY;BYSECOND=" + "0," * 512
    for text in (rule, f"DTSTART:20270101T090000\nRRULE:{rule}", "FREQ=DAILY" + "\n" * 5000, "A" * 1_000_000):
        refused(lambda: RRule(text), "INVALID_RRULE")
    for text in ("P" + "1" * 300 + "D", "R/2027-01-01/P1D" + " " * 300, "P1D" * 100_000):
        refused(lambda: parse_interval(text), "INVALID_INTERVAL")


def test_lists_have_at_most_64_items() -> None:
    assert Cron(f"{listed(64, 59)} * * * *")
    assert RRule(f"FREQ=YEARLY;BYYEARDAY={listed(64, 365).replace('0,', '366,', 1)}")
    refused(lambda: Cron(f"{listed(65, 59)} * * * *"), "INVALID_CRON")
    refused(lambda: Cron(f"* * * * +{listed(65, 6)}"), "INVALID_CRON")
    refused(lambda: RRule(f"FREQ=DAILY;BYMINUTE={listed(65, 59)}"), "INVALID_RRULE")
    refused(lambda: RRule("FREQ=WEEKLY;BYDAY=" + ",".join(["MO"] * 65)), "INVALID_RRULE")
    refused(lambda: Dates([START + timedelta(days=day) for day in range(10_001)]), "INVALID_DATES")


def test_intervals_are_at_least_one_second() -> None:
    assert Every("PT1S") and Every(timedelta(seconds=1))
    for short in ("PT0S", "PT0.999999S", "PT0.5S", "P0D", timedelta(0), timedelta(microseconds=1), timedelta(-1)):
        refused(lambda: Every(short), "INVALID_INTERVAL")
    for spec in (Cron("* * * * * *"), Cron("*/1 * * * * * *"), RRule("FREQ=SECONDLY")):
        bound = spec.bind("UTC", created_at=START)
        first = bound.next(START)
        assert first is not None
        assert (bound.next(first) or START) - first >= timedelta(seconds=1)


def test_years_range_from_1970_to_2199() -> None:
    for year in (1, 1969, 2200, 9999):
        at = datetime(year, 6, 1, tzinfo=UTC)
        refused(lambda: Dates([at]), "INVALID_DATES")
        refused(lambda: Every("P1D", at), "INVALID_INTERVAL")
        refused(lambda: RRule(f"FREQ=DAILY;UNTIL={year:04}0101T000000Z"), "INVALID_RRULE")
        refused(lambda: RRule(f"DTSTART:{year:04}0101T000000\nRRULE:FREQ=DAILY"), "INVALID_RRULE")
        refused(lambda: Cron(f"0 0 0 1 1 ? {year}"), "INVALID_CRON")
    last = Cron("0 0 0 31 12 ? 2199").bind("UTC", created_at=START)
    assert last.next(START) == datetime(2199, 12, 31, tzinfo=UTC)
    assert last.next(datetime(2199, 12, 31, tzinfo=UTC)) is None


@virtual
async def test_a_job_must_run_before_2200(world: World) -> None:
    app = world.app()
    job = await app.schedule_at("t", datetime(2199, 12, 31, 23, 59, 59, tzinfo=UTC))
    assert job.run_at.year == 2199
    for at in (datetime(2200, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC), "9999-12-31T23:59:59-12:00"):
        with pytest.raises(InvalidInput, match="2199"):
            await app.schedule_at("t", at, timezone="UTC")
    assert len((await app.list()).items) == 1


@pytest.mark.parametrize("name", ["catch_up_limit", "hold_above"])
@pytest.mark.parametrize("value", [-1, 10_001, 10**30, 1.5, 2.0, float("nan"), float("inf"), True, "7", None])
@virtual
async def test_catch_up_has_a_limit(world: World, name: str, value: Any) -> None:
    app = world.app()
    with pytest.raises(InvalidInput) as caught:
        await app.schedule_repeat("t", Every("PT1M"), catch_up="all", **{name: value})
    assert caught.value.code == "INVALID_CATCH_UP"
    assert (await app.schedules.list(None, 10, None)).items == []


@virtual
async def test_a_backfill_supports_a_dry_run_and_has_a_limit(world: World) -> None:
    app = world.app()
    made = await app.schedule_repeat("t", Every("PT1S"), start=START)
    await app.schedules.pause(made.id)  # otherwise the planner would run them
    await world.advance(hours=4)
    with pytest.raises(InvalidInput) as caught:
        await app.schedules.backfill(made.id, START, after(hours=3))
    assert caught.value.code == "BACKFILL_TOO_LARGE"
    shown = await app.schedules.backfill(made.id, START, after(seconds=100), dry_run=True)
    assert (await app.list()).items == []
    done = await app.schedules.backfill(made.id, START, after(seconds=100))
    assert len(done.instants) == len(shown.instants) == 100


@pytest.mark.parametrize(
    "payload",
    [float("nan"), [float("inf")], {"x": -float("inf")}, 2**64, -(2**63) - 1, 10**5000, "\x00", {"\x00": 1}, "\ud800",
     ["\udfff"], {"\ud83d": 1}, {1: 1}, b"x", object(), {1, 2}, START, 1j],
    ids=lambda payload: type(payload).__name__,
)  # fmt: skip
@virtual
async def test_payloads_that_a_database_cannot_store_are_refused_everywhere(world: World, payload: Any) -> None:
    app = world.app()
    job = await app.schedule_at("t", after(hours=1), payload=1)
    attempts = [
        lambda: app.schedule_at("t", payload=payload),
        lambda: app.schedule_at("t", payload={"deep": [{"er": payload}]}),
        lambda: app.schedule_at("t", metadata={"m": payload}),
        lambda: app.schedule_many([JobSpec(topic="t"), JobSpec(topic="t", payload=payload)]),
        lambda: app.schedule_repeat("t", Every("PT1M"), payload=payload),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidInput) as caught:
            await attempt()
        assert caught.value.code == "PAYLOAD_NOT_JSON"
    assert [one.id for one in await app.list()] == [job.id]
    assert (await app.schedules.list(None, 10, None)).items == []
