"""Validation of the options of a schedule: policies, labels, alert channels and calendars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from timebell.client.validation import check_text
from timebell.durations import Duration
from timebell.errors import InvalidInput
from timebell.model.payload import sanitize_text
from timebell.model.policy import CatchUp, Overlap, WhenLate, parse_choice, parse_seconds
from timebell.model.schedule import Action, Policies
from timebell.recurrence import Calendar, OnCalendar, Spec
from timebell.store.schedules import actions

_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
_CHANNEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

SCHEDULE_OPTIONS = (
    "timezone", "name", "tenant_id", "enabled", "start", "end", "max_runs", "calendar", "roll", "when_late",
    "on_unhandled", "correlation_id", "client_request_id", "created_by", *Policies.__slots__, *Action.__slots__,
)  # fmt: skip


def code_hash(spec: Spec, topic: str, options: Mapping[str, Any]) -> str:
    """Return a fingerprint of a code-defined schedule, which is stored again only if the fingerprint changes."""
    facts = repr((repr(spec), topic, sorted((name, repr(value)) for name, value in options.items())))
    return sha256(facts.encode()).hexdigest()


def check_description(description: Any) -> str | None:
    """Return a valid description, of at most 2,000 characters. Raises InvalidInput."""
    if description is None or (
        isinstance(description, str) and len(description) <= 2000 and sanitize_text(description, 2000) == description
    ):
        return description
    raise InvalidInput(
        f"description is {description!r:.60}; it must be text of at most 2,000 characters.",
        code="INVALID_DESCRIPTION",
    )


def check_labels(labels: Any) -> dict[str, str]:
    """Return valid labels: up to 32 names with values, used as filters. Raises InvalidInput."""
    if labels is None:
        return {}
    if (
        not isinstance(labels, Mapping)
        or len(labels) > 32
        or any(not _LABEL_NAME.fullmatch(str(name)) for name in labels)
    ):
        raise InvalidInput(
            f"labels is {labels!r:.60}.", code="INVALID_LABELS",
            fix='Use up to 32, such as {"team": "billing"}, with names of letters, digits, dots, dashes, underscores.',
        )  # fmt: skip
    return {name: check_text(value, "labels") for name, value in labels.items()}


def build_policies(options: dict[str, Any]) -> Policies:
    """Return the policies; removes their options from `options`."""
    default = Policies()
    return Policies(
        overlap=parse_choice(Overlap, options.pop("overlap", default.overlap), "overlap"),
        catch_up=parse_choice(CatchUp, options.pop("catch_up", default.catch_up), "catch_up"),
        catch_up_window=parse_seconds(options.pop("catch_up_window", default.catch_up_window), "catch_up_window"),
        catch_up_limit=_check_job_count(options.pop("catch_up_limit", default.catch_up_limit), "catch_up_limit"),
        missed_after=parse_seconds(options.pop("missed_after", default.missed_after), "missed_after"),
        when_late=parse_choice(WhenLate, options.pop("when_late", default.when_late), "when_late"),
        catch_up_pace=parse_seconds(options.pop("catch_up_pace", default.catch_up_pace), "catch_up_pace"),
        hold_above=_check_job_count(options.pop("hold_above", default.hold_above), "hold_above"),
        jitter=parse_seconds(options.pop("jitter", default.jitter), "jitter"),
        tolerance=parse_seconds(options.pop("tolerance", default.tolerance), "tolerance"),
        notify=_check_channels(options.pop("notify", default.notify)),
    )


def _check_job_count(value: Any, field: str) -> int:
    """Return a valid number of catch-up jobs, at most MAX_BACKFILLED_OCCURRENCES. Raises InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= actions.MAX_BACKFILLED_OCCURRENCES:
        raise InvalidInput(
            f"{field} is {value!r:.60}.", code="INVALID_CATCH_UP",
            fix=f"Use a whole number from 0 to {actions.MAX_BACKFILLED_OCCURRENCES:,}.",
        )  # fmt: skip
    return value


def _check_channels(channels: Any) -> tuple[str, ...]:
    """Return valid names of alert channels, up to 10. Raises InvalidInput (INVALID_NOTIFY)."""
    names = (
        (channels,) if isinstance(channels, str) else tuple(channels) if isinstance(channels, list | tuple) else (None,)
    )
    if len(names) > 10 or not all(isinstance(name, str) and _CHANNEL_NAME.fullmatch(name) for name in names):
        raise InvalidInput(
            f"notify is {channels!r:.60}.", code="INVALID_NOTIFY",
            fix='Use names defined in TIMEBELL_ALERT_URLS, such as ["billing"] for billing=slack://...',
        )  # fmt: skip
    return names


def check_fixed_delay_policies(policies: Policies) -> None:
    """Check that a fixed delay has default policies: its runs cannot overlap or be missed. Raises InvalidInput."""
    if policies.overlap is not Overlap.SKIP:
        raise InvalidInput(
            f"overlap is {policies.overlap}, but a fixed delay is measured from the last run: runs cannot overlap.",
            code="INVALID_OVERLAP", fix="Omit overlap or since.",
        )  # fmt: skip
    if policies.catch_up is not CatchUp.LATEST:
        raise InvalidInput(
            f"catch_up is {policies.catch_up}, but a fixed delay has no missed runs: after an outage it runs once.",
            code="INVALID_CATCH_UP", fix="Omit catch_up. Use expires_after to prevent a late run.",
        )  # fmt: skip


def parse_calendar_name(reference: str) -> tuple[str, int | None]:
    """Split `name`, or `name@3` for version 3, into name and version. Raises InvalidInput (INVALID_CALENDAR)."""
    name, at, version = reference.partition("@") if isinstance(reference, str) else ("", "", "")
    number = int(version) if version.isascii() and version.isdigit() and len(version) < 10 else None
    if not 0 < len(name) <= 200 or "\0" in name or bool(at) != bool(number):
        raise InvalidInput(
            f"calendar is {reference!r:.60}.", code="INVALID_CALENDAR",
            fix='Use a Calendar, a name, or a name and a version such as "kr@3".',
        )  # fmt: skip
    return name, number


def apply_calendar(spec: Spec, options: dict[str, Any], calendar: Calendar | None) -> Spec:
    """Return the spec restricted to the calendar in the options; removes `calendar` and `roll` from `options`."""
    reference, roll = options.pop("calendar", None), options.pop("roll", None)
    if reference is None:
        if roll is not None:
            raise InvalidInput(
                "roll requires a calendar.", code="INVALID_ROLL", fix='Pass calendar=Calendar.of("KR"), or omit roll.'
            )
        return spec
    if isinstance(reference, Calendar):
        return OnCalendar(spec, reference, roll or "skip")
    _, version = parse_calendar_name(reference)
    return OnCalendar(spec, calendar or Calendar(), roll or "skip", follows=version is None)


def parse_optional_seconds(value: Duration | None, field: str) -> float | None:
    """Return a duration in seconds, at least 1 ms; None stays None. Raises InvalidInput."""
    return None if value is None else parse_seconds(value, field, minimum=0.001)
