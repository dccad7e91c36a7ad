"""Time zones: their segments of constant UTC offset, and conversion between local times and instants.

Only UTC offsets are used. There is no notion of daylight saving time and no assumption about the size of a clock
change, so negative daylight saving (Dublin), changes of half an hour (Lord Howe) or two hours (Troll), changes at
midnight (Cairo) and missing days (Apia, 2011-12-30) need no special cases.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import import_module, resources
from importlib.resources.abc import Traversable
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from timebell.errors import InvalidInput, InvalidInstant, InvalidTimezone
from timebell.recurrence.instants import DAY_S, MAX_S, MIN_S, SECOND_US, from_us, local_to_us
from timebell.recurrence.zone_names import check_name

Note = Literal["gap", "fold"]

_VERSION = re.compile(r"\b\d{4}[a-z]\b")

_FAR_PAST = -1000 * DAY_S
_FAR_FUTURE = MAX_S + 1000 * DAY_S
LOCAL_MARGIN_S = 2 * DAY_S
"""More than any UTC offset plus any clock change, in seconds."""
_SCAN_STEP_S = 7 * DAY_S  # a POSIX TZ rule changes the offset at most twice a year, months apart


class Segment(NamedTuple):
    """A range of time [start, end), in epoch seconds, with one UTC offset; also the offsets `before` and `after` it."""

    start: int
    end: int
    offset: int
    before: int
    after: int

    @property
    def gap(self) -> tuple[int, int]:
        """The local seconds [from, to) that the clock skipped at the start of this segment; empty if none."""
        return self.start + self.before, max(self.start + self.before, self.start + self.offset)


class Zone:
    """An IANA time zone over 1970..2199, as defined by one release of the database.

    Created by `zone(name)` or `Release.zone`: there is one object per name and release.
    """

    __slots__ = ("_starts", "info", "missing_days", "name", "release", "segments")

    def __init__(self, name: str, data: bytes, release: Release) -> None:
        self.name = name
        self.release = release
        self.info = ZoneInfo.from_file(BytesIO(data), key=name)
        self.segments = _build_segments(self.info, data)
        self._starts = [segment.start for segment in self.segments]
        self.missing_days = frozenset(_missing_days(self.segments))
        """Local dates that the zone skipped, in days since 1970-01-01."""

    def __repr__(self) -> str:
        return f"zone({self.name!r})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.release.zone, (self.name,)

    def index(self, second: int) -> int:
        """Return the index in `segments` of an epoch second."""
        return (bisect_right(self._starts, second) or 1) - 1

    def offset(self, second: int) -> int:
        """Return the UTC offset at an epoch second, in seconds east of UTC."""
        return self.segments[(bisect_right(self._starts, second) or 1) - 1].offset

    def instants(self, local: int) -> tuple[int, ...]:
        """Return the epoch seconds (none, one or two) at which clocks in this zone show a local second."""
        return tuple(local - s.offset for s in self._segments_near(local) if s.start <= local - s.offset < s.end)

    def resolve(self, local: int) -> tuple[int, Note | None]:
        """Return one epoch second for a local second (RFC 5545 3.3.5), and "gap", "fold" or None.

        In a fold it is the first of the two, in a gap the one computed with the offset before the gap.
        """
        seconds = self.instants(local)
        if seconds:
            return seconds[0], "fold" if len(seconds) > 1 else None
        return next(local - s.before for s in self._segments_near(local) if s.gap[0] <= local < s.gap[1]), "gap"

    def gap_end(self, local: int) -> int | None:
        """Return the epoch second at which the gap around a local second ends, or None outside of gaps."""
        return next((s.start for s in self._segments_near(local) if s.gap[0] <= local < s.gap[1]), None)

    def is_ambiguous(self, second: int) -> bool:
        """Return whether clocks in this zone show the local time of an epoch second twice."""
        return len(self.instants(second + self.offset(second))) > 1

    def jumps(self, start: int, end: int) -> Iterator[Segment]:
        """Yield the segments that begin with a clock change within [start, end)."""
        for segment in self.segments[self.index(start) : self.index(end - 1) + 1]:
            if start <= segment.start < end and segment.offset != segment.before:
                yield segment

    def local(self, instant: datetime) -> datetime:
        """Convert an aware datetime to this zone."""
        return instant.astimezone(self.info)

    def _segments_near(self, local: int) -> list[Segment]:
        return self.segments[self.index(local - LOCAL_MARGIN_S) : self.index(local + LOCAL_MARGIN_S) + 1]


def zone(name: str) -> Zone:
    """Return the zone with exactly this IANA name, from the `tzdata` package, not from the host's zone data.

    Raises InvalidTimezone for other spellings, abbreviations, fixed offsets and legacy names.
    """
    return installed_release().zone(name)


def zone_key(timezone: str | ZoneInfo) -> str:
    """Return the name of a time zone that is specified by its name or as a ZoneInfo; it is not checked."""
    return str(timezone.key) if isinstance(timezone, ZoneInfo) else timezone


class Release:
    """A release of the IANA database: a folder of compiled zones (TZif files), and a version."""

    def __init__(self, folder: Traversable, version: str) -> None:
        self.folder = folder
        self.version = version
        self._zones: dict[str, Zone] = {}

    def __repr__(self) -> str:
        return f"Release({str(self.folder)!r}, {self.version!r})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (installed_release, ()) if self is installed_release() else (Release, (self.folder, self.version))

    def zone(self, name: str) -> Zone:
        """Return the zone with exactly this name. Raises InvalidTimezone, also for a zone missing in this release."""
        cached = self._zones.get(name) if isinstance(name, str) else None
        if cached is None:
            check_name(name)
            try:
                data = self.folder.joinpath(*name.split("/")).read_bytes()
            except OSError:
                raise InvalidTimezone(
                    f"The zone data {self.version} has no {name}.", fix="Install a newer release of the tzdata package."
                ) from None
            cached = self._zones[name] = Zone(name, data, self)
        return cached


@cache
def installed_release() -> Release:
    """Return the release in the `tzdata` package, which is used for all computations, not the host's zone data."""
    return Release(resources.files("tzdata").joinpath("zoneinfo"), str(import_module("tzdata").IANA_VERSION))


def open_release(path: Path) -> Release:
    """Open another release, to compare it with the installed one. Raises InvalidInput (ZONE_DATA_NOT_FOUND).

    `path` is a zoneinfo folder (the system's is /usr/share/zoneinfo), the folder of a `tzdata` package, or the target
    of `pip install --target`.
    """
    for folder in (path, path / "zoneinfo", path / "tzdata" / "zoneinfo"):
        utc = folder / "Etc" / "UTC"
        if utc.is_file() and utc.read_bytes()[:4] == b"TZif":
            return Release(folder, _read_version(folder))
    raise InvalidInput(
        f"{path} is not a folder of compiled zone data.", code="ZONE_DATA_NOT_FOUND",
        fix="Specify one such as /usr/share/zoneinfo, or one created by: pip install --target FOLDER tzdata",
    )  # fmt: skip


def _read_version(folder: Path) -> str:
    """Return the version stated in the first line of `tzdata.zi` or in `+VERSION`, else "unknown"."""
    for name in ("tzdata.zi", "+VERSION"):
        with suppress(OSError), (folder / name).open(encoding="utf-8") as file:
            if match := _VERSION.search(file.readline()):
                return match[0]
    return "unknown"


def tzdata_version() -> str:
    """Return the version of the IANA database in use, e.g. "2026a"."""
    return installed_release().version


def resolve_local(local: datetime, zone: Zone) -> tuple[datetime, Note | None]:
    """Return the UTC instant of a naive local time, and "gap" or "fold" if the clock skips or repeats it, else None.

    By RFC 5545 3.3.5, a local time in a gap uses the offset before the gap (02:30 becomes 03:30), one in a fold is the
    first of the two. Raises InvalidInstant outside 1970..2199 or for an aware datetime.
    """
    if local.tzinfo is not None:
        raise InvalidInstant(f"{local.isoformat()} has an offset, so it is not a local time.", fix="Omit the offset.")
    second, fraction = divmod(local_to_us(local), SECOND_US)
    if not MIN_S <= second < MAX_S:
        raise InvalidInstant(f"{local.isoformat()} is outside the years 1970 to 2199.", fix="Use a year in that range.")
    instant, note = zone.resolve(second)
    return from_us(instant * SECOND_US + fraction), note


def _build_segments(info: ZoneInfo, data: bytes) -> list[Segment]:
    changes = [_FAR_PAST]
    offsets = [_offset(info, MIN_S)]
    for second in _offset_changes(info, data):
        if MIN_S < second < MAX_S and (offset := _offset(info, second)) != offsets[-1]:
            changes.append(second)
            offsets.append(offset)
    ends = [*changes[1:], _FAR_FUTURE]
    befores = [offsets[0], *offsets[:-1]]
    afters = [*offsets[1:], offsets[-1]]
    return [Segment(*row) for row in zip(changes, ends, offsets, befores, afters, strict=True)]


def _offset_changes(info: ZoneInfo, data: bytes) -> Iterator[int]:
    """Yield every epoch second at which the offset may change, in order.

    By RFC 8536 these are the times listed in the 64-bit block of the file, followed by a POSIX TZ rule for all later
    times.
    """

    def counts(at: int) -> tuple[int, ...]:
        return struct.unpack_from(">6l", data, at + 20)

    isut, isstd, leap, times, types, chars = counts(0)
    second_header = 44 + times * 5 + types * 6 + chars + leap * 8 + isstd + isut
    count = counts(second_header)[3]
    listed = struct.unpack_from(f">{count}q", data, second_header + 44)
    yield from listed
    if b"," not in data[data.rindex(b"\n", 0, -1) :]:
        return
    listed_until = max(listed[-1] if listed else MIN_S, MIN_S)
    for low in range(listed_until, MAX_S, _SCAN_STEP_S):
        if _offset(info, low) != _offset(info, low + _SCAN_STEP_S):
            yield _bisect_change(info, low, low + _SCAN_STEP_S)


def _bisect_change(info: ZoneInfo, low: int, high: int) -> int:
    old = _offset(info, low)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(info, middle) == old:
            low = middle
        else:
            high = middle
    return high


def _offset(info: ZoneInfo, second: int) -> int:
    offset = datetime.fromtimestamp(second, UTC).astimezone(info).utcoffset()
    assert offset is not None
    return offset // timedelta(seconds=1)


def _missing_days(segments: list[Segment]) -> Iterator[int]:
    for segment in segments:
        low, high = segment.gap
        yield from range(-(-low // DAY_S), high // DAY_S)
