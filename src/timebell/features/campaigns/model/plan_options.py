"""The parsers of the options of a campaign. Pure. All raise InvalidInput (INVALID_CAMPAIGN)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.campaign import QuietHours, QuietHoursPolicy
from timebell.features.campaigns.model.experiment import Experiment, parse_experiment

ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Canary:
    """Stop after the first `size` recipients if more than `max_error_rate` (0 to 1) of them failed."""

    size: int
    max_error_rate: float


def parse_text(options: Mapping[str, Any], name: str) -> str | None:
    """Return a text that is not empty; None if it is not specified."""
    value = options.get(name)
    if value is not None and (not isinstance(value, str) or "\0" in value or not value):
        raise invalid_campaign(f"{name} is {value!r:.60}, not a non-empty string")
    return value


def parse_flag(options: Mapping[str, Any], name: str) -> bool:
    """Return a boolean, False by default."""
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise invalid_campaign(f"{name} is {value!r:.60}; use true or false")
    return value


def parse_one_of(options: Mapping[str, Any], name: str, choices: Sequence[str]) -> str | None:
    """Return one of the choices; None if it is not specified."""
    value = options.get(name)
    if value is not None and value not in choices:
        raise invalid_campaign(f"{name} is {value!r:.60}; use one of {', '.join(choices)}")
    return value


def parse_object(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object, {} by default."""
    value = options.get(name, {})
    if not isinstance(value, Mapping):
        raise invalid_campaign(f"{name} is {value!r:.60}, not an object")
    return dict(value)


def parse_field_names(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of fields and the names that replace them."""
    value = parse_object(options, "fields")
    rename = value.get("rename", {})
    if value.keys() - {"rename"} or not isinstance(rename, Mapping):
        raise invalid_campaign('fields must be like {"rename": {"bible_code": "bibleCode"}}')
    if not all(isinstance(new, str) and new for new in rename.values()) or len(set(rename.values())) < len(rename):
        raise invalid_campaign("fields.rename maps two fields to the same name, or one to no name")
    return dict(rename)


def parse_integer(options: Mapping[str, Any], name: str, minimum: int, maximum: int) -> int | None:
    """Return an integer within limits; None if it is not specified."""
    value = options.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum):
        raise invalid_campaign(f"{name} is {value!r:.60}; it must be an integer from {minimum:,} to {maximum:,}")
    return value


def parse_fraction(options: Mapping[str, Any], name: str, maximum: float) -> float | None:
    """Return a number from 0 to `maximum`; None if it is not specified."""
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise invalid_campaign(f"{name} is {value!r:.60}; it must be a fraction such as 0.2, at most {maximum:g}")
    return float(value)


def parse_chunk_delay(options: Mapping[str, Any]) -> timedelta | None:
    """Return the interval between the starts of two chunks; None if it is adaptive."""
    if options.get("chunkDelayMs") == ADAPTIVE:
        return None
    milliseconds = parse_integer(options, "chunkDelayMs", 0, 86_400_000)
    return timedelta(milliseconds=2000 if milliseconds is None else milliseconds)


def parse_quiet_hours(options: Mapping[str, Any]) -> QuietHours | None:
    """Return the quiet hours, if any."""
    value = parse_object(options, "quietHours")
    if not value:
        return None
    try:
        start, end = time.fromisoformat(value["start"]), time.fromisoformat(value["end"])
        policy = QuietHoursPolicy(value.get("then", "wait"))
    except (KeyError, TypeError, ValueError):
        raise invalid_campaign(
            'quietHours must be {"start": "21:00", "end": "08:00", "then": "wait" or "skip"}'
        ) from None
    if any(each.second or each.microsecond for each in (start, end)):  # stored with minute resolution
        raise invalid_campaign("quietHours must be whole minutes")
    return QuietHours(start, end, policy)


def parse_local_time(options: Mapping[str, Any]) -> datetime | None:
    """Return the naive local time, if any."""
    value = options.get("localTime")
    if value is None:
        return None
    try:
        local = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        local = None
    if local is None or local.tzinfo is not None:
        raise invalid_campaign(f"localTime is {value!r:.60}, not a local time such as 2027-03-01T09:00")
    return local


def parse_expiry(options: Mapping[str, Any]) -> datetime | None:
    """Return the instant at which the campaign expires, if any."""
    value = options.get("expiresAt")
    if value is None:
        return None
    try:
        parsed = datetime.fromisoformat(value)
        expires_at = None if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        expires_at = None
    if expires_at is None:
        raise invalid_campaign(f"expiresAt is {value!r:.60}, not an instant such as 2027-03-01T12:00:00Z")
    return expires_at


def parse_translations(options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the texts by language."""
    value = parse_object(options, "translations")
    for language, texts in value.items():
        if not isinstance(texts, Mapping) or texts.keys() - {"title", "body"} or not texts:
            raise invalid_campaign(f'translations.{language!s:.20} must be like {{"title": "...", "body": "..."}}')
        for name in texts:
            parse_text(texts, name)
    return {str(language): dict(texts) for language, texts in value.items()}


def parse_experiment_options(options: Mapping[str, Any]) -> Experiment:
    """Return the variants and the hold-out."""
    experiment = parse_experiment(options.get("variants"), options.get("holdOut"))
    for variant in experiment.variants:
        for name in ("title", "body", "image"):
            parse_text(variant.texts, name)
        parse_object(variant.texts, "data")
        parse_translations(variant.texts)
    return experiment


def parse_canary(options: Mapping[str, Any]) -> Canary | None:
    """Return the canary, if any."""
    value = parse_object(options, "canary")
    if not value:
        return None
    size, rate = parse_integer(value, "size", 1, 10**9), parse_fraction(value, "maxErrorRate", 1.0)
    if value.keys() - {"size", "maxErrorRate"} or size is None or rate is None:
        raise invalid_campaign('canary must be like {"size": 1000, "maxErrorRate": 0.05}')
    return Canary(size, rate)


def invalid_campaign(problem: str, fix: str = "") -> InvalidInput:
    """Return the error of an invalid option."""
    return InvalidInput(f"{problem}.", code="INVALID_CAMPAIGN", fix=fix or "See docs/guides/campaigns.md.")
