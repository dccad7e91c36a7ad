from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta, timezone
from random import Random
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell import ids
from timebell.ids import instant_of_id, lowest_id_at, new_id, new_ids, occurrence_key, seeded

NOW = datetime(2026, 11, 21, 9, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture(autouse=True)
def fresh() -> object:
    """Ids of one test don't follow those of another, whose instants may have been later."""
    with seeded(os.urandom):
        yield


def test_an_id_is_a_uuid_of_version_7_in_its_usual_text() -> None:
    for id in (new_id(NOW), *new_ids(NOW, 3)):
        uuid = UUID(id)
        assert (uuid.version, uuid.variant) == (7, RFC_4122)
        assert str(uuid) == id


@given(st.datetimes(datetime(1970, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC)))
def test_an_id_carries_its_millisecond(now: datetime) -> None:
    with seeded(os.urandom):
        assert instant_of_id(new_id(now)) == now.replace(microsecond=now.microsecond // 1000 * 1000)


def test_the_instant_may_be_in_any_zone() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-7)))
    assert instant_of_id(new_id(elsewhere)) == NOW.replace(microsecond=123000)


@pytest.mark.parametrize(
    "id", [str(UUID("f6e5f93d-731e-4b58-9c68-d80b659f7e47")), "", "no id", "01a1fc76-cfd2-8915-a19f-5c8e2de5ca66"]
)
def test_other_ids_have_no_instant(id: str) -> None:
    with pytest.raises(ValueError, match="UUID"):
        instant_of_id(id)


@given(st.lists(st.tuples(st.integers(-5000, 5000), st.integers(1, 50)), max_size=50))
def test_ids_increase_when_the_clock_steps_back(draws: list[tuple[int, int]]) -> None:
    drawn: list[str] = []
    for ms, count in draws:
        now = NOW + timedelta(milliseconds=ms)
        drawn.append(new_id(now))
        drawn += new_ids(now, count)
    assert drawn == sorted(set(drawn))


@given(st.binary(min_size=1, max_size=8))
def test_ids_increase_with_any_random_source(pattern: bytes) -> None:
    with seeded(lambda count: (pattern * count)[:count]):
        drawn = [new_id(NOW) for _ in range(600)]
    assert drawn == sorted(set(drawn))


def test_exhausted_millisecond_continues_with_the_next() -> None:
    source = ids._IdGenerator(lambda count: b"\xff" * count)
    first = source.draw(1000)
    source._number = (1 << 62) - 1
    second = source.draw(1000)
    assert first < second
    assert UUID(second).version == 7
    assert instant_of_id(second) == instant_of_id(first) + timedelta(milliseconds=1)


def test_ids_of_many_threads_are_unique() -> None:
    drawn: list[list[str]] = [[] for _ in range(4)]

    def draw(into: list[str]) -> None:
        for _ in range(2000):
            into.append(new_id(NOW))

    threads = [threading.Thread(target=draw, args=(into,)) for into in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == sorted(each) for each in drawn)
    assert len({id for each in drawn for id in each}) == 8000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_draws_other_ids_even_when_the_lock_was_held() -> None:
    new_id(NOW)
    reader, writer = os.pipe()
    with ids._generator.lock:
        child = os.fork()
        if not child:
            os.write(writer, "\n".join(new_ids(NOW, 500)).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        theirs = pipe.read().split("\n")
    os.waitpid(child, 0)
    ours = new_ids(NOW, 500)
    assert len({*theirs, *ours}) == 1000
    assert not {id[14:23] for id in theirs} & {
        id[14:23] for id in ours
    }  # the child reseeds its random bits immediately


def test_seeded_ids_are_the_same_every_time_and_leave_no_trace() -> None:
    def draw() -> list[str]:
        with seeded(Random(7).randbytes):
            return [new_id(NOW), *new_ids(NOW + timedelta(days=4000), 1000)]

    before = new_id(NOW)
    assert draw() == draw()
    assert before < new_id(NOW)
    assert instant_of_id(new_id(NOW)) == instant_of_id(before)


@pytest.mark.parametrize(
    ("scheduled_at", "kind", "key"),
    [
        (datetime(2026, 11, 21, 9, tzinfo=UTC), "planned", "s.20261121T090000Z"),
        (datetime(2026, 11, 21, 9, 0, 0, 250_000, UTC), "planned", "s.20261121T090000.250000Z"),
        (datetime(2026, 11, 21, 9, 0, 0, 1, UTC), "manual", "s.20261121T090000.000001Z.manual"),
        (datetime(2026, 11, 21, 9, tzinfo=UTC), "backfill", "s.20261121T090000Z.backfill"),
        (datetime(2026, 11, 21, 2, tzinfo=timezone(timedelta(hours=-7))), "planned", "s.20261121T090000Z"),
        (datetime(1, 1, 1, tzinfo=UTC), "planned", "s.00010101T000000Z"),
    ],
)
def test_an_occurrence_has_one_key(scheduled_at: datetime, kind: str, key: str) -> None:
    assert occurrence_key("s", scheduled_at, kind) == key


def test_a_naive_instant_has_no_key() -> None:
    with pytest.raises(ValueError, match="time zone"):
        occurrence_key("s", datetime(2026, 11, 21))


@given(
    st.datetimes(timezones=st.just(UTC)),
    st.datetimes(timezones=st.just(UTC)),
    st.sampled_from(["planned", "manual", "backfill"]),
)
def test_different_instants_have_different_keys_without_a_colon(a: datetime, b: datetime, kind: str) -> None:
    keys = {occurrence_key("s", a, kind), occurrence_key("s", b, kind)}
    assert len(keys) == len({a, b})
    assert not any(":" in key for key in keys)


def test_lowest_id_of_an_instant_lies_between_earlier_and_later_ids() -> None:
    at = datetime(2030, 5, 1, tzinfo=UTC)
    with seeded(Random(3).randbytes):
        before, then = new_id(at - timedelta(milliseconds=1)), new_id(at)
    assert before < lowest_id_at(at) < then
    assert instant_of_id(lowest_id_at(at)) == at


@given(st.integers(), st.lists(st.sampled_from([0, 1, 2, 6, 7, 8, 1018, 1019, 2500]), max_size=5), st.booleans())
def test_drawing_many_ids_equals_drawing_them_one_by_one(seed: int, counts: list[int], nearly_full: bool) -> None:
    one, many = ids._IdGenerator(Random(seed).randbytes), ids._IdGenerator(Random(seed).randbytes)
    for ms, count in enumerate(counts, 1000):
        if nearly_full:
            one._number = many._number = 2**62 - 2**40
        assert many.draw_many(ms, count) == [one.draw(ms) for _ in range(count)]
