"""Verify that a translated recurrence fires at the same times as the original."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, product, takewhile, zip_longest
from typing import Any

from timebell.cli.importers.entry import Entry, NotExpressible
from timebell.recurrence import Cron, Spec, Union, zone
from timebell.recurrence.instants import SECOND_US, to_us
from timebell.recurrence.preview import iter_fires

COMPARED_FIRES = 100
COMPARED_YEARS = timedelta(days=2 * 366)
CLOCK_CHANGE_MARGIN = timedelta(hours=2, seconds=1)
FIRES_PER_CLOCK_CHANGE = 2000
LAST_FIRE = datetime(2199, 12, 30, tzinfo=UTC)  # Timebell has no later ones
ROUNDING = timedelta(milliseconds=1)  # other schedulers compute with floats


def verify(entry: Entry, now: datetime, bounds: dict[str, Any]) -> tuple[Spec, int]:
    """Return the entry's recurrence, verified, and the number of compared fires. Raises NotExpressible.

    The next 100 fires and those around each clock change of the next two years must be equal. For cron, the treatment
    of clock changes is chosen so that they are.
    """
    assert isinstance(entry.recurrence, Spec)
    expected = list(islice(takewhile(lambda fire: fire < LAST_FIRE, entry.fires(now)), COMPARED_FIRES))
    changes = _clock_changes(entry.timezone, now) if entry.clock_changes_apply else []
    around = [list(_until(end, entry.fires(start))) for start, end in changes]
    difference = None
    for spec in _clock_change_variants(entry.recurrence, enabled=bool(changes)):
        recurrence = spec.bind(entry.timezone, created_at=now, **bounds)
        found = _find_difference(expected, islice(iter_fires(recurrence, now), len(expected) + 1), COMPARED_FIRES)
        for (start, end), fires in zip(changes, around, strict=True):
            found = found or _find_difference(fires, _until(end, iter_fires(recurrence, start)), FIRES_PER_CLOCK_CHANGE)
        if found is None:
            return spec, len(expected)
        difference = difference or found
    raise NotExpressible(f"its times would differ: {difference}")


def _clock_changes(timezone: str, now: datetime) -> list[tuple[datetime, datetime]]:
    low, high = (to_us(edge) // SECOND_US for edge in (now, now + COMPARED_YEARS))
    starts = [datetime.fromtimestamp(jump.start, UTC) for jump in zone(timezone).jumps(low, high)]
    return [(max(now, start - CLOCK_CHANGE_MARGIN), start + CLOCK_CHANGE_MARGIN) for start in starts if start > now]


def _clock_change_variants(spec: Spec, *, enabled: bool) -> Iterator[Spec]:
    """Yield the spec as it is, then with each other treatment of clock changes."""
    yield spec
    if enabled:
        for wildcard, gap, fold in product(("real", "fixed"), ("end", "shift", "skip"), ("first", "both", "last")):
            variant = _replace_choices(spec, {"wildcard": wildcard, "gap": gap, "fold": fold})
            if variant != spec:
                yield variant


def _replace_choices(spec: Spec, choices: dict[str, Any]) -> Spec:
    if isinstance(spec, Cron):
        return replace(spec, **choices)
    if isinstance(spec, Union):
        return Union(_replace_choices(part, choices) for part in spec.specs)
    return spec


def _until(end: datetime, fires: Iterator[datetime]) -> Iterator[datetime]:
    return islice(takewhile(lambda fire: fire < end, fires), FIRES_PER_CLOCK_CHANGE)


def _find_difference(expected: list[datetime], actual: Iterable[datetime], limit: int) -> str | None:
    """Return a description of the first difference, None if there is none.

    A list of `limit` fires is truncated, so it does not differ from a longer one.
    """
    for before, after in islice(zip_longest(expected, actual), limit):
        if before is None or after is None or abs(before - after) > ROUNDING:
            return f"{_format(before)} became {_format(after)}"
    return None


def _format(fire: datetime | None) -> str:
    return "no run" if fire is None else f"{fire.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
