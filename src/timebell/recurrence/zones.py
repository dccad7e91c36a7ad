"""Time zones: which names are good, and where the wall clock jumps.

Only UTC offsets are read. There is no notion of "summer time" here and no length of a jump is assumed,
so negative daylight saving (Dublin), half an hour (Lord Howe), two hours (Troll), jumps at midnight
(Cairo) and whole missing days (Apia, 2011-12-30) are nothing special.
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
from timebell.recurrence.instants import DAY_S, MAX_S, MIN_S, SECOND, from_us, wall_us
from timebell.recurrence.zone_names import check_name

Note = Literal["gap", "fold"]

_VERSION = re.compile(r"\b\d{4}[a-z]\b")

_FAR_PAST = -1000 * DAY_S
_FAR_FUTURE = MAX_S + 1000 * DAY_S
WIDEST = 2 * DAY_S
"""More than any offset from UTC plus any jump of the clock."""
_SCAN = 7 * DAY_S  # a POSIX TZ rule changes the offset at most twice a year, months apart


class Segment(NamedTuple):
    """A stretch of time [start, end), in epoch seconds, with one UTC offset; the neighbours' offsets too."""

    start: int
    end: int
    offset: int
    before: int
    after: int

    @property
    def gap(self) -> tuple[int, int]:
        """The local seconds [from, to) that the clock skipped when this stretch began, if any."""
        return self.start + self.before, max(self.start + self.before, self.start + self.offset)


class Zone:
    """An IANA time zone over 1970..2199, as a release of the database has it. Make one with `zone(name)`; there is
    one object per name and release."""

    __slots__ = ("_starts", "info", "missing_days", "name", "release", "segments")

    def __init__(self, name: str, data: bytes, release: Release) -> None:
        self.name = name
        self.release = release
        self.info = ZoneInfo.from_file(BytesIO(data), key=name)
        self.segments = _segments(self.info, data)
        self._starts = [segment.start for segment in self.segments]
        self.missing_days = frozenset(_missing_days(self.segments))
        """Local dates that never were, as days since 1970-01-01."""

    def __repr__(self) -> str:
        return f"zone({self.name!r})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.release.zone, (self.name,)

    def index(self, second: int) -> int:
        """Which of `segments` an epoch second falls in."""
        return (bisect_right(self._starts, second) or 1) - 1

    def offset(self, second: int) -> int:
        """Seconds east of UTC at an epoch second."""
        return self.segments[(bisect_right(self._starts, second) or 1) - 1].offset

    def instants(self, local: int) -> tuple[int, ...]:
        """The epoch seconds, none, one or two, at which clocks here show a local second."""
        return tuple(local - s.offset for s in self._near(local) if s.start <= local - s.offset < s.end)

    def resolve(self, local: int) -> tuple[int, Note | None]:
        """One epoch second for a local second (RFC 5545 3.3.5): the first of two; in a gap, as if the
        offset before the gap still held."""
        found = self.instants(local)
        if found:
            return found[0], "fold" if len(found) > 1 else None
        return next(local - s.before for s in self._near(local) if s.gap[0] <= local < s.gap[1]), "gap"

    def gap_end(self, local: int) -> int | None:
        """The epoch second at which the gap around a local second ends; None if it is in no gap."""
        return next((s.start for s in self._near(local) if s.gap[0] <= local < s.gap[1]), None)

    def ambiguous(self, second: int) -> bool:
        """Whether clocks here show this second's local time twice."""
        return len(self.instants(second + self.offset(second))) > 1

    def jumps(self, start: int, end: int) -> Iterator[Segment]:
        """The segments that begin with a jump of the clock within [start, end)."""
        for segment in self.segments[self.index(start) : self.index(end - 1) + 1]:
            if start <= segment.start < end and segment.offset != segment.before:
                yield segment

    def local(self, instant: datetime) -> datetime:
        """An aware datetime as it reads here."""
        return instant.astimezone(self.info)

    def _near(self, local: int) -> list[Segment]:
        return self.segments[self.index(local - WIDEST) : self.index(local + WIDEST) + 1]


def zone(name: str) -> Zone:
    """The zone with exactly this IANA name, from the `tzdata` package whatever the host has installed.

    Raises InvalidTimezone for any other spelling, abbreviations, fixed offsets and legacy names.
    """
    return installed().zone(name)


class Release:
    """A release of the IANA database: its zones, as compiled files (TZif) in a folder, and its version."""

    def __init__(self, folder: Traversable, version: str) -> None:
        self.folder = folder
        self.version = version
        self._zones: dict[str, Zone] = {}

    def __repr__(self) -> str:
        return f"Release({str(self.folder)!r}, {self.version!r})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (installed, ()) if self is installed() else (Release, (self.folder, self.version))

    def zone(self, name: str) -> Zone:
        """The zone of exactly this name. Raises InvalidTimezone, also for one that this release does not have."""
        found = self._zones.get(name) if isinstance(name, str) else None
        if found is None:
            check_name(name)
            try:
                data = self.folder.joinpath(*name.split("/")).read_bytes()
            except OSError:
                raise InvalidTimezone(
                    f"The zone data {self.version} has no {name}.", fix="Install a newer release of the tzdata package."
                ) from None
            found = self._zones[name] = Zone(name, data, self)
        return found


@cache
def installed() -> Release:
    """The release in the `tzdata` package, which all is computed with, whatever the host has installed."""
    return Release(resources.files("tzdata").joinpath("zoneinfo"), str(import_module("tzdata").IANA_VERSION))


def open_release(path: Path) -> Release:
    """Another release, to compare with: a zoneinfo folder (the system's is /usr/share/zoneinfo), or the folder of a
    `tzdata` package or what `pip install --target` made of it. Raises InvalidInput (ZONE_DATA_NOT_FOUND)."""
    for folder in (path, path / "zoneinfo", path / "tzdata" / "zoneinfo"):
        utc = folder / "Etc" / "UTC"
        if utc.is_file() and utc.read_bytes()[:4] == b"TZif":
            return Release(folder, _version_in(folder))
    raise InvalidInput(
        f"{path} is no folder of compiled zone data.", code="ZONE_DATA_NOT_FOUND",
        fix="Give one such as /usr/share/zoneinfo, or one made by: pip install --target FOLDER tzdata",
    )  # fmt: skip


def _version_in(folder: Path) -> str:
    """The version a folder of zone data states: in the first line of `tzdata.zi`, or in `+VERSION`."""
    for name in ("tzdata.zi", "+VERSION"):
        with suppress(OSError), (folder / name).open(encoding="utf-8") as file:
            if match := _VERSION.search(file.readline()):
                return match[0]
    return "unknown"


def tzdata_version() -> str:
    """The release of the IANA database in use, e.g. "2026a"."""
    return installed().version


def resolve_local(wall: datetime, where: Zone) -> tuple[datetime, Note | None]:
    """The UTC instant of a naive local time, and "gap" or "fold" if the clock skipped or repeated it.

    RFC 5545 3.3.5: in a gap the offset before the gap counts (02:30 becomes 03:30), in a fold the first.
    Raises InvalidInstant outside 1970..2199 or for an aware datetime.
    """
    if wall.tzinfo is not None:
        raise InvalidInstant(
            f"{wall.isoformat()} has an offset already, so it is no local time.", fix="Leave the offset out."
        )
    second, fraction = divmod(wall_us(wall), SECOND)
    if not MIN_S <= second < MAX_S:
        raise InvalidInstant(f"{wall.isoformat()} is outside the years 1970 to 2199.", fix="Give a year in that range.")
    instant, note = where.resolve(second)
    return from_us(instant * SECOND + fraction), note


def _segments(info: ZoneInfo, data: bytes) -> list[Segment]:
    changes = [_FAR_PAST]
    offsets = [_offset(info, MIN_S)]
    for second in _changes(info, data):
        if MIN_S < second < MAX_S and (offset := _offset(info, second)) != offsets[-1]:
            changes.append(second)
            offsets.append(offset)
    ends = [*changes[1:], _FAR_FUTURE]
    befores = [offsets[0], *offsets[:-1]]
    afters = [*offsets[1:], offsets[-1]]
    return [Segment(*row) for row in zip(changes, ends, offsets, befores, afters, strict=True)]


def _changes(info: ZoneInfo, data: bytes) -> Iterator[int]:
    """Every epoch second at which the offset may change, in order. RFC 8536: times listed in the file's
    64-bit block, then a POSIX TZ rule for ever."""

    def counts(at: int) -> tuple[int, ...]:
        return struct.unpack_from(">6l", data, at + 20)

    isut, isstd, leap, times, types, chars = counts(0)
    second_header = 44 + times * 5 + types * 6 + chars + leap * 8 + isstd + isut
    count = counts(second_header)[3]
    listed = struct.unpack_from(f">{count}q", data, second_header + 44)
    yield from listed
    if b"," not in data[data.rindex(b"\n", 0, -1) :]:
        return
    known = max(listed[-1] if listed else MIN_S, MIN_S)
    for low in range(known, MAX_S, _SCAN):
        if _offset(info, low) != _offset(info, low + _SCAN):
            yield _bisect(info, low, low + _SCAN)


def _bisect(info: ZoneInfo, low: int, high: int) -> int:
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
