"""Accepted time zone names, and suggestions for other names."""

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
_MAX_NAME_LENGTH = 64
_NAMES_WITHOUT_AREA = frozenset({"UTC", "GMT"})
_ABBREVIATIONS = {
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
def accepted_names() -> frozenset[str]:
    """Return every name that `zone` accepts."""
    listed = resources.files("tzdata").joinpath("zones").read_text("ascii").split()
    return frozenset(name for name in listed if name in _NAMES_WITHOUT_AREA or name.partition("/")[0] in _AREAS)


def check_name(name: object) -> None:
    """Raise InvalidTimezone, with a suggestion, unless `name` is one of `accepted_names()`."""
    if isinstance(name, str) and name in accepted_names():
        return
    excerpt = name if isinstance(name, str) and len(name) <= _MAX_NAME_LENGTH else repr(name)[:_MAX_NAME_LENGTH]
    raise InvalidTimezone(
        f"Invalid timezone: {excerpt}. Use IANA format (e.g., America/New_York)",
        fix=_suggest(name.strip()) if isinstance(name, str) and len(name) <= _MAX_NAME_LENGTH else "",
    )


def _suggest(name: str) -> str:
    meanings = _ABBREVIATIONS.get(name.upper())
    if meanings:
        phrase = "It may mean" if len(meanings) > 1 else "It means"
        return f"{phrase} {' or '.join(meanings)}: use that name."
    if offset := _OFFSET.fullmatch(name):
        return _suggest_for_offset(*offset.groups())
    if name in (links := _legacy_names()):
        return f"{name} is a legacy name: use {links[name]}."
    matches = _close_matches(name)
    return f"Did you mean {' or '.join(matches)}?" if matches else ""


def _suggest_for_offset(sign: str, hours: str, minutes: str | None) -> str:
    fixed_name = f"Etc/GMT{'-' if sign == '+' else '+'}{int(hours)}"
    if minutes in (None, "00") and fixed_name in accepted_names() and int(hours):
        return f"Use the zone of a place; or, for a fixed offset, {fixed_name} (its sign is inverted)."
    return "An offset is not a time zone: use the zone of a place."


def _close_matches(name: str) -> list[str]:
    names_by_folded = {known.casefold(): known for known in accepted_names()}
    folded_name = name.casefold().replace(" ", "_")
    if folded_name in names_by_folded:
        return [names_by_folded[folded_name]]
    cities = {known.rpartition("/")[2].casefold(): known for known in sorted(accepted_names(), reverse=True)}
    if folded_name in cities:
        return [cities[folded_name]]
    return [names_by_folded[match] for match in get_close_matches(folded_name, names_by_folded, n=2, cutoff=0.75)]


@cache
def _legacy_names() -> dict[str, str]:
    """Return the current name of each legacy name, from the `L target name` lines of the database's text form."""
    text = resources.files("tzdata").joinpath("zoneinfo", "tzdata.zi").read_text("utf-8")
    rows = (line.split() for line in text.splitlines() if line.startswith("L "))
    return {row[2]: row[1] for row in rows if row[1] in accepted_names() and row[2] not in accepted_names()}
