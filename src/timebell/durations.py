"""Durations in the one notation of the product: a timedelta, seconds, `1h30m` or `PT1H30M`."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

Duration = timedelta | float | str
"""A length of time: a timedelta, a number of seconds, or text such as `500ms`, `15m`, `1h30m` or `PT15M`."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SHORT_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_ISO_DURATION = re.compile(
    r"P(?=.)(?:(\d{1,9})W)?(?:(\d{1,9})D)?(?:T(?=.)(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,9}(?:\.\d{1,6})?)S)?)?",
    re.ASCII,
)
_ISO_UNITS = (("w", "W"), ("d", "D"), ("h", "H"), ("m", "M"), ("s", "S"))


def parse_duration(raw: Any) -> float | None:
    """Return a duration in seconds; None if it is not one. Days have 24 hours; months and years are refused."""
    if isinstance(raw, timedelta):
        return raw.total_seconds()
    text = str(raw).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) and len(text) < 16:
        return float(text)
    if iso := _ISO_DURATION.fullmatch(text):
        amounts = zip(_ISO_UNITS, iso.groups(), strict=True)
        return float(sum(float(amount) * _UNIT_SECONDS[unit] for (unit, _), amount in amounts if amount))
    parts = _split_short(text.lower())
    return float(sum(float(amount) * _UNIT_SECONDS[unit] for amount, unit in parts)) if parts else None


def to_iso_text(text: str) -> str:
    """Return text such as `1h30m` or `1d` as ISO 8601 (`PT1H30M`, `P1D`); other text unchanged."""
    parts = _split_short(text)
    units = [unit for _, unit in parts]
    known = [unit for unit, _ in _ISO_UNITS]
    if not units or not set(units) <= set(known) or units != sorted(set(units), key=known.index):
        return text
    letters, amounts = dict(_ISO_UNITS), {unit: amount for amount, unit in parts}
    days = "".join(amounts[unit] + letters[unit] for unit in units if unit in "wd")
    time = "".join(amounts[unit] + letters[unit] for unit in units if unit in "hms")
    return f"P{days}T{time}" if time else f"P{days}"


def _split_short(text: str) -> list[tuple[str, str]]:
    """Return the amounts and units of text such as `1h30m`; empty if it is anything else."""
    parts = _SHORT_PART.findall(text)
    return parts if len(text) <= 40 and "".join(amount + unit for amount, unit in parts) == text else []
