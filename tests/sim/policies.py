"""Every policy value with its changes to the scene of `tests/sim/scene.py`, and the pairs that exclude each other.

Times are those of the scene: minutes and seconds after or before midnight.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from timebell import Calendar, Cancel, Every, Fail, Retry, Snooze, Timebell
from timebell.client import schedule_options
from timebell.client.schedules import Schedules
from timebell.model.policy import Backoff, CatchUp, OnUnhandled, Overlap, WhenLate
from timebell.model.schedule import Action, Policies
from timebell.recurrence import Recurrence
from timebell.recurrence.spec import Roll, Since
from timebell.targets import arrived

from .scene import Scene, at


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of one policy. `of` is the policy: a schedule has one value of each. `does` maps occurrences to
    actions of the handler, `acts` maps times to changes of the schedule."""

    of: str
    covers: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    does: dict[str, Any] = field(default_factory=dict)
    acts: dict[str, Callable[[Scene], Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    handled_from: str | None = None


def _policy(of: str, value: Any, **more: Any) -> Value:
    return Value(of=of, options={of: value}, **more)


def _fails(event: Any) -> None:
    if event.attempt < 3:
        raise RuntimeError("the first two times it fails")


def _snoozes(event: Any) -> None:
    if event.attempt == 1:
        raise Snooze(150)


def _cancels(_: Any) -> None:
    raise Cancel("there is nothing to do")


def _fails_permanently(_: Any) -> None:
    raise Fail("no attempt can succeed")


FAILS = {"23:54": _fails, "00:34": _fails}
EDIT = {"00:31": lambda scene: scene.edit()}

VALUES: dict[str, Value] = {
    **{f"overlap={one}": _policy("overlap", one) for one in Overlap},
    **{f"catch_up={one}": _policy("catch_up", one) for one in CatchUp},
    **{f"when_late={one}": Value(of="when_late", options={"when_late": one}) for one in WhenLate},
    "catch_up_window": _policy("catch_up_window", 300),
    "catch_up_limit": _policy("catch_up_limit", 2),
    "catch_up_pace": _policy("catch_up_pace", 30),
    "hold_above": _policy("hold_above", 0),
    "missed_after": _policy("missed_after", 10),
    "tolerance": _policy("tolerance", 0),
    "jitter": _policy("jitter", 90),
    "start": _policy("start", at("23:49")),
    "end": _policy("end", at("00:41")),
    "max_runs": _policy("max_runs", 30),
    **{
        f"roll={roll}": Value(of="calendar", options={"calendar": Calendar(holidays=["2027-03-01"]), "roll": roll})
        for roll in typing.get_args(Roll)
    },
    "skip": Value(of="skip", acts={"23:45": lambda scene: scene.override("skip", "23:52", "00:12", "00:26")}),
    "move": Value(of="move", acts={"23:45": lambda scene: scene.override("move", "23:56", "00:14", "00:28")}),
    "undo": Value(of="undo", acts={"23:45": lambda scene: scene.undo("23:58", "00:16")}),
    "pause": Value(of="pause", covers=("resume",), acts={
        "00:25:30": lambda scene: scene.pause(), "00:33:30": lambda scene: scene.resume(),
    }),
    "resume(catch_up=True)": Value(of="pause", acts={
        "00:25:30": lambda scene: scene.pause(), "00:33:30": lambda scene: scene.resume(catch_up=True),
    }),
    "trigger": Value(of="trigger", acts=dict.fromkeys(("00:27", "00:39"), lambda scene: scene.trigger())),
    "backfill": Value(of="backfill", acts={"00:40": lambda scene: scene.backfill("23:30", "00:39")}),
    "backlog": Value(of="backlog", acts={"00:36": lambda scene: scene.release_backlog()}),
    "edit": Value(of="edit", covers=("put", "schedule_repeat"), acts=EDIT),
    "revert": Value(of="revert", acts={"00:30": lambda scene: scene.edit(), "00:43": lambda scene: scene.revert()}),
    "delete": Value(of="delete", acts={"00:44": lambda scene: scene.delete()}),
    **{
        f"backoff={one}": Value(
            of="retry", options={"retry": Retry(3, one, 100, max_delay=150, jitter=0.2)}, does=FAILS,
            covers=("retry",) if one is Backoff.FIXED else (),
        )
        for one in Backoff
    },
    "timeout": _policy("timeout", 100),
    "expires_after": _policy("expires_after", 130),
    "priority": _policy("priority", 5),
    # It does not hold until an edit adds a payload.
    "condition": _policy("condition", [{"field": "payload", "op": "not_empty"}]),
    "queue(concurrency)": Value(of="queue", covers=("queue",), options={"queue": "narrow"}),
    "group": Value(of="queue", covers=("group",), options={"queue": "grouped", "group": "one"}),
    "pause_queue": Value(of="queue", covers=("resume_queue",), options={"queue": "stopped"}, acts={
        "00:23": lambda scene: scene.app.pause_queue("stopped"),
        "00:33": lambda scene: scene.app.resume_queue("stopped"),
    }),
    "pause_all": Value(of="pause_all", covers=("resume_all",), acts={
        "00:22": lambda scene: scene.app.pause_all(), "00:30:20": lambda scene: scene.app.resume_all(),
    }),
    "Snooze": Value(of="Snooze", does={"23:58": _snoozes, "00:38": _snoozes}),
    "Cancel": Value(of="Cancel", does={"00:02": _cancels, "00:36": _cancels}),
    "Fail": Value(of="Fail", does={"00:00": _fails_permanently, "00:40": _fails_permanently}),
    "cancel": Value(of="cancel", acts={"00:25": lambda scene: scene.cancel_all()}, covers=("cancel_all",)),
    "manual_retry": Value(of="manual_retry", does={"00:20": _fails}, options={"retry": Retry(1)}, acts={
        "00:28": lambda scene: scene.retry_failed(),
    }),
    **{
        f"on_unhandled={one}": Value(of="on_unhandled", options={"on_unhandled": one}, handled_from="00:20:30")
        for one in OnUnhandled
    },
    **{
        f"since={one}": Value(of="since", spec=Every("PT2M", since=one)) for one in typing.get_args(Since)
    },
    "repair": Value(of="repair", acts=dict.fromkeys(("00:06:30", "00:12", "00:25:30"), lambda scene: scene.repair())),
    "enabled": Value(of="enabled", options={"enabled": False}, acts={"23:55:30": lambda scene: scene.resume()}),
}  # fmt: skip

# Not policies: contents and owner of a job, and methods that read or concern one-time jobs.
NOT_POLICIES = {
    "topic", "payload", "metadata", "owner_id", "target", "timezone", "name", "tenant_id", "correlation_id",
    "get", "list", "history", "calendar", "get_calendar", "find_calendar", "save_calendar", "find_created_at", "put",
    "draft", "schedule_at", "schedule_in", "schedule_many", "wait", "upgrade",
    "client_request_id", "reschedule", "erase", "open", "close", "run", "on", "middleware",
    "lifespan", "running", "schedule", "upcoming", "description", "labels", "created_by", "notify", "audit", "why",
    "arrivals", "require_arrivals", "render_request", "redeliver", "backlogs",
    "unless",  # evaluated by a database at the time of a condition
    "NoFreeThread",  # not raised by handlers
}  # fmt: skip

# Fields whose values or parts have another name here.
OTHER_NAMES = {
    "roll": "roll=skip", "calendar": "roll=skip", "overrides": "skip", "on_unhandled":
    "on_unhandled=hold", "spec": "since=last_end", "release": "start",
}  # fmt: skip

# Refused pairs and their error codes.
_GRIDLESS = {
    **{f"overlap={one}": "INVALID_OVERLAP" for one in Overlap if one is not Overlap.SKIP},
    **{f"catch_up={one}": "INVALID_CATCH_UP" for one in CatchUp if one is not CatchUp.LATEST},
    **{f"roll={roll}": "INVALID_RECURRENCE" for roll in typing.get_args(Roll)},
    "max_runs": "INVALID_RECURRENCE",
    "skip": "NOT_AN_OCCURRENCE", "move": "NOT_AN_OCCURRENCE", "undo": "NOT_AN_OCCURRENCE",
}  # fmt: skip
REFUSED = {
    frozenset({f"since={since}", other}): code for since in typing.get_args(Since) for other, code in _GRIDLESS.items()
}


def explain_exclusion(one: str, other: str) -> str | None:
    """Return why no schedule can have both, or None."""
    if VALUES[one].of == VALUES[other].of:
        return f"a schedule has one {VALUES[one].of} at a time"
    if (code := REFUSED.get(frozenset({one, other}))) is not None:
        return f"refused: {code}"
    if {VALUES[one].of, VALUES[other].of} == {"retry", "manual_retry"}:
        return "a schedule has one retry policy: that of manual_retry is a single attempt"
    return None


def pairs() -> Iterator[tuple[str, str]]:
    """Return all pairs of values."""
    return combinations(VALUES, 2)


def declared() -> set[str]:
    """Return the names of all policies, policy values and methods in the source."""
    found = {name for name in schedule_options.SCHEDULE_OPTIONS if name not in Policies.__slots__}
    for kind in (Policies, Action, Recurrence):
        hints = typing.get_type_hints(
            kind, vars(inspect.getmodule(kind)) | {"Override": Any, "Release": Any, "Spec": Any}
        )
        for one in [one for one in dataclasses.fields(kind) if one.init]:
            words = hints[one.name]
            if isinstance(words, type) and issubclass(words, enum.StrEnum):
                found |= {f"{one.name}={word}" for word in words}
            else:
                found.add(one.name)
    found |= {f"backoff={word}" for word in Backoff} | {f"on_unhandled={word}" for word in OnUnhandled}
    found |= {f"since={word}" for word in typing.get_args(Since)} | {f"roll={word}" for word in typing.get_args(Roll)}
    for owner in (Schedules, Timebell):
        found |= {name for name, _ in inspect.getmembers(owner, callable) if not name.startswith("_")}
    found |= {name for name, kind in inspect.getmembers(arrived, inspect.isclass) if issubclass(kind, Exception)
              and kind.__module__ == arrived.__name__}  # fmt: skip
    return found


def covered() -> set[str]:
    """Return the names covered by `VALUES`, `NOT_POLICIES` and `OTHER_NAMES`."""
    also_covered = {name for value in VALUES.values() for name in value.covers}
    return set(VALUES) | also_covered | NOT_POLICIES | set(OTHER_NAMES)
