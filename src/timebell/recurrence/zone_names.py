"""Which zone names are accepted, and what to say about the others."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib import resources

from timebell.errors import InvalidTimezone

_AREAS = frozenset(
    {"Africa", "America", "Antarctica", "Arctic", "Asia", "Atlantic"}
    | {"Australia", "Etc", "Europe", "Indian", "Pacific"}
)
_LONGEST = 64
_BARE = frozenset({"UTC", "GMT"})
_MEANINGS = {
    "ACST": ("Australia/Darwin", "Australia/Adelaide"),
    "AEST": ("Australia/Sydney", "Australia/Brisbane"),
    "AST": ("America/Halifax", "America/Puerto_Rico", "Asia/Riyadh"),
    "BST": ("Europe/London", "Asia/Dhaka", "Pacific/Bougainville"),
    "CDT": ("America/Chicago", "America/Havana"),
    "CEST": ("Europe/Paris", "Europe/Berlin"),
    "CET": ("Europe/Paris", "Europe/Berlin", "Africa/Algiers"),
    "CST": ("America/Chicago", "America/Costa_Rica", "America/Havana", "Asia/Shanghai"),
    "EDT": ("America/New_York",),
    "EET": ("Europe/Athens", "Africa/Cairo"),
    "EST": ("America/New_York", "America/Panama"),
    "EST5EDT": ("America/New_York",),
    "CST6CDT": ("America/Chicago",),
    "MST7MDT": ("America/Denver",),
    "PST8PDT": ("America/Los_Angeles",),
    "HST": ("Pacific/Honolulu",),
    "IST": ("Asia/Kolkata", "Europe/Dublin", "Asia/Jerusalem"),
    "JST": ("Asia/Tokyo",),
    "KST": ("Asia/Seoul",),
    "MDT": ("America/Denver",),
    "MSK": ("Europe/Moscow",),
    "MST": ("America/Denver", "America/Phoenix"),
    "PDT": ("America/Los_Angeles",),
    "PST": ("America/Los_Angeles", "Asia/Manila"),
    "SST": ("Asia/Singapore", "Pacific/Pago_Pago"),
    "WET": ("Europe/Lisbon", "Atlantic/Canary"),
}
_OFFSET = re.compile(r"(?:UTC|GMT)?([+-])(\d{1,2})(?::?(\d\d))?", re.ASCII | re.IGNORECASE)


@cache
def names() -> frozenset[str]:
    """Every name that `zone` accepts."""
    listed = resources.files("tzdata").joinpath("zones").read_text("ascii").split()
    return frozenset(name for name in listed if name in _BARE or name.partition("/")[0] in _AREAS)


def check_name(name: object) -> None:
    """Raises InvalidTimezone, with what to write instead, unless `name` is one of `names()`."""
    if isinstance(name, str) and name in names():
        return
    shown = name if isinstance(name, str) and len(name) <= _LONGEST else repr(name)[:_LONGEST]
    raise InvalidTimezone(
        f"Invalid timezone: {shown}. Use IANA format (e.g., America/New_York)",
        fix=_fix(name.strip()) if isinstance(name, str) and len(name) <= _LONGEST else "",
    )


def _fix(name: str) -> str:
    meanings = _MEANINGS.get(name.upper())
    if meanings:
        one = "It may mean" if len(meanings) > 1 else "It means"
        return f"{one} {' or '.join(meanings)}: write that."
    if offset := _OFFSET.fullmatch(name):
        return _fix_offset(*offset.groups())
    if name in (links := _links()):
        return f"{name} is a legacy name: write {links[name]}."
    close = _close(name)
    return f"Did you mean {' or '.join(close)}?" if close else ""


def _fix_offset(sign: str, hours: str, minutes: str | None) -> str:
    named = f"Etc/GMT{'-' if sign == '+' else '+'}{int(hours)}"
    if minutes in (None, "00") and named in names() and int(hours):
        return f"Name a place; or, for a fixed offset, write {named} (its sign is inverted)."
    return "An offset is no time zone: name a place."


def _close(name: str) -> list[str]:
    folded = {known.casefold(): known for known in names()}
    wanted = name.casefold().replace(" ", "_")
    if wanted in folded:
        return [folded[wanted]]
    cities = {known.rpartition("/")[2].casefold(): known for known in sorted(names(), reverse=True)}
    if wanted in cities:
        return [cities[wanted]]
    return [folded[match] for match in get_close_matches(wanted, folded, n=2, cutoff=0.75)]


@cache
def _links() -> dict[str, str]:
    """Legacy names to their modern ones: the `L target name` lines of the database's text form."""
    text = resources.files("tzdata").joinpath("zoneinfo", "tzdata.zi").read_text("utf-8")
    rows = (line.split() for line in text.splitlines() if line.startswith("L "))
    return {row[2]: row[1] for row in rows if row[1] in names() and row[2] not in names()}
