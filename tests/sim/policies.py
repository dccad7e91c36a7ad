"""Every policy value as what it changes in the scene of `tests/sim/scene.py`, and which pairs of them never meet.

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

from timebell import Calendar, Cancel, Every, Retry, Snooze, Timebell
from timebell.client import schedules as verbs
from timebell.client.schedules import Schedules
from timebell.model.policy import Backoff, CatchUp, Lateness, Overlap, Unheard
from timebell.model.schedule import Action, Policies
from timebell.recurrence import Recurrence
from timebell.recurrence.core import Roll, Since
from timebell.targets import handler

from .scene import Scene, at


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of one policy. `of` is the policy: a schedule has one value of each. `does` says what the handler
    does at an occurrence, `acts` what is done to the schedule and when."""

    of: str
    covers: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    does: dict[str, Any] = field(default_factory=dict)
    acts: dict[str, Callable[[Scene], Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    heard_from: str | None = None


def _one(of: str, value: Any, **more: Any) -> Value:
    return Value(of=of, options={of: value}, **more)


def _fails(event: Any) -> None:
    if event.attempt < 3:
        raise RuntimeError("the first two times it fails")


def _snoozes(event: Any) -> None:
    if event.attempt == 1:
        raise Snooze(150)


def _gives_up(_: Any) -> None:
    raise Cancel("there is nothing to do")


FAILS = {"23:54": _fails, "00:34": _fails}
EDIT = {"00:31": lambda scene: scene.edit()}

VALUES: dict[str, Value] = {
    **{f"overlap={one}": _one("overlap", one) for one in Overlap},
    **{f"catch_up={one}": _one("catch_up", one) for one in CatchUp},
    **{f"lateness={one}": Value(of="class_", options={"class_": one}) for one in Lateness},
    "catch_up_window": _one("catch_up_window", 300),
    "catch_up_limit": _one("catch_up_limit", 2),
    "catch_up_pace": _one("catch_up_pace", 30),
    "hold_above": _one("hold_above", 0),
    "missed_after": _one("missed_after", 10),
    "tolerance": _one("tolerance", 0),
    "jitter": _one("jitter", 90),
    "start": _one("start", at("23:49")),
    "end": _one("end", at("00:41")),
    "max_runs": _one("max_runs", 30),
    **{
        f"roll={roll}": Value(of="calendar", options={"calendar": Calendar(holidays=["2027-03-01"]), "roll": roll})
        for roll in typing.get_args(Roll)
    },
    "skip": Value(of="skip", acts={"23:45": lambda scene: scene.override("skip", "23:52", "00:12", "00:26")}),
    "move": Value(of="move", acts={"23:45": lambda scene: scene.override("move", "23:56", "00:14", "00:28")}),
    "undo": Value(of="undo", acts={"23:45": lambda scene: scene.undone("23:58", "00:16")}),
    "pause": Value(of="pause", covers=("resume",), acts={
        "00:25:30": lambda scene: scene.pause(), "00:33:30": lambda scene: scene.resume(),
    }),
    "resume(catch_up=True)": Value(of="pause", acts={
        "00:25:30": lambda scene: scene.pause(), "00:33:30": lambda scene: scene.resume(catch_up=True),
    }),
    "trigger": Value(of="trigger", acts=dict.fromkeys(("00:27", "00:39"), lambda scene: scene.trigger())),
    "backfill": Value(of="backfill", acts={"00:40": lambda scene: scene.backfill("23:30", "00:39")}),
    "recover": Value(of="recover", acts={"00:36": lambda scene: scene.recover()}),
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
    "timeout": _one("timeout", 100),
    "expires_after": _one("expires_after", 130),
    "priority": _one("priority", 5),
    # It does not hold before an edit gives the scene a payload.
    "condition": _one("condition", [{"field": "payload", "op": "not_empty"}]),
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
    "Cancel": Value(of="Cancel", does={"00:02": _gives_up, "00:36": _gives_up}),
    "cancel": Value(of="cancel", acts={"00:25": lambda scene: scene.cancel_all()}, covers=("cancel_all",)),
    "replay": Value(of="replay", does={"00:20": _fails}, options={"retry": Retry(1)}, acts={
        "00:28": lambda scene: scene.replay(),
    }),
    **{
        f"unheard={one}": Value(of="unheard", options={"unheard": one}, heard_from="00:20:30") for one in Unheard
    },
    **{
        f"since={one}": Value(of="since", spec=Every("PT2M", since=one)) for one in typing.get_args(Since)
    },
    "heal": Value(of="heal", acts=dict.fromkeys(("00:06:30", "00:12", "00:25:30"), lambda scene: scene.heal())),
    "enabled": Value(of="enabled", options={"enabled": False}, acts={"23:55:30": lambda scene: scene.resume()}),
}  # fmt: skip

# What is no policy: what a job carries, whose it is, and verbs that read, or concern one-shots.
PLAIN = {
    "topic", "payload", "metadata", "owner_id", "target", "timezone", "name", "tenant_id", "correlation_id",
    "get", "list", "history", "calendar", "calendar_of", "save_calendar", "since", "put", "draft", "schedule_at",
    "schedule_many", "reschedule", "erase", "open", "close", "run", "on", "middleware", "lifespan", "running",
    "schedule", "upcoming", "description", "labels", "created_by", "notify", "audit", "why",
    "arrivals", "reach_arrivals", "request_of", "resend", "backlogs",
    "unless",  # asked of a database, where and when a condition is
}  # fmt: skip

# Fields whose words or parts are values of another name here.
SAID_AS = {
    "class_": "lateness=state", "roll": "roll=skip", "calendar": "roll=skip", "overrides": "skip", "unheard":
    "unheard=hold", "spec": "since=last_end", "release": "start",
}  # fmt: skip

# Pairs that are refused, and with what code.
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


def never_meet(one: str, other: str) -> str | None:
    """Why no schedule has both; None if one may."""
    if VALUES[one].of == VALUES[other].of:
        return f"a schedule has one {VALUES[one].of} at a time"
    if (code := REFUSED.get(frozenset({one, other}))) is not None:
        return f"refused: {code}"
    if {VALUES[one].of, VALUES[other].of} == {"retry", "replay"}:
        return "a schedule has one retry policy: that of replay is a single try"
    return None


def pairs() -> Iterator[tuple[str, str]]:
    """Every two values."""
    return combinations(VALUES, 2)


def declared() -> set[str]:
    """Every policy, policy value and verb that the source has, by name."""
    found = {name for name in verbs.OPTIONS if name not in Policies.__slots__}
    for kind in (Policies, Action, Recurrence):
        hints = typing.get_type_hints(kind, vars(inspect.getmodule(kind)) | {"Override": Any, "Release": Any})
        for one in [one for one in dataclasses.fields(kind) if one.init]:
            words = hints[one.name]
            if isinstance(words, type) and issubclass(words, enum.StrEnum):
                found |= {f"{one.name}={word}" for word in words}
            else:
                found.add(one.name)
    found |= {f"backoff={word}" for word in Backoff} | {f"unheard={word}" for word in Unheard}
    found |= {f"since={word}" for word in typing.get_args(Since)} | {f"roll={word}" for word in typing.get_args(Roll)}
    for owner in (Schedules, Timebell):
        found |= {name for name, _ in inspect.getmembers(owner, callable) if not name.startswith("_")}
    found |= {name for name, kind in inspect.getmembers(handler, inspect.isclass) if issubclass(kind, Exception)
              and kind.__module__ == handler.__name__}  # fmt: skip
    return found


def covered() -> set[str]:
    """All that `VALUES`, `PLAIN` and `SAID_AS` speak of."""
    said = {name for value in VALUES.values() for name in value.covers}
    return set(VALUES) | said | PLAIN | set(SAID_AS)
