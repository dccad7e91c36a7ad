"""What must, may and must not have happened: from what was asked, and when it was acknowledged."""

from __future__ import annotations

from dataclasses import dataclass

from timebell.torture.history import DISARMS, NODE_FAULTS, STORE_FAULTS, History, Occurrence, Step, Thing

EPSILON = 1.0  # seconds late that are fine when nothing is broken
TAKEOVER = 21.0  # seconds until another node has what a dead one held: lease 15, heartbeat 5, and 1
STORE_BACK = 5.0  # seconds from the database's return
LOCKS = 11.0  # seconds until the database takes back what a frozen client had locked
RUN = 4.0  # seconds that an attempt may take


@dataclass(slots=True)
class Expected:
    """One occurrence. `since` is when it could start at the earliest: due, and surely known."""

    thing: Thing
    kind: str
    due_us: int
    due: float
    since: float
    word: str = "mustnot"
    why: str = "after-cancel"
    attempts: int | None = None
    """After a cancel that came while it ran: the last attempt that may have started."""

    @property
    def occurrence(self) -> Occurrence:
        return self.thing.label, self.kind, self.due_us


def expect(history: History) -> dict[Occurrence, Expected]:
    """Every occurrence that the oracle knows of, with its word."""
    found: dict[Occurrence, Expected] = {}
    for thing in history.things.values():
        for one in [*_planned(history, thing), *_manual(history, thing)]:
            before = found.get(one.occurrence)
            if before is None or _RANK[one.word] > _RANK[before.word]:
                found[one.occurrence] = one
    return found


_RANK = {"mustnot": 0, "may": 1, "must": 2}


def _planned(history: History, thing: Thing) -> list[Expected]:
    kind = "once" if thing.once else "planned"
    found = []
    for value, life in thing.versions():
        for due_us in history.instants(thing, value):
            due = history.due(due_us)
            one = Expected(thing, kind, due_us, due, due)
            if thing.once:
                one.since = min((max(due, step.completed) for arms, step in life if arms), default=due)
            one.since = due if one.since == float("inf") else one.since
            said = {classify(at, life, deadline(history, at), history.end) for at in _instants(history, one)}
            one.word, one.why = said.pop()
            if any(word != one.word for word, _ in said):
                one.word = "may"
            if thing.once:
                _cancelled(history, one)
            else:
                _deleted(history, one)
            found.append(one)
    return found


def _instants(history: History, one: Expected) -> list[float]:
    """When it could start: one instant, but some while the database's clock was wrong."""
    unsure = history.unsure(one.since)
    return [one.since, one.since - unsure, one.since + unsure] if unsure else [one.since]


def deadline(history: History, due: float) -> float:
    """When it must have happened, whatever touched it."""
    broken = history.touching(due - TAKEOVER, due + EPSILON, *NODE_FAULTS, *STORE_FAULTS)
    able = TAKEOVER if broken else EPSILON + history.untold
    able += history.unsure(due) + history.starved(due, due + TAKEOVER)
    return history.down.deadline(due, able)


def classify(due: float, life: list[tuple[bool, Step]], by: float, end: float) -> tuple[str, str]:
    """`must` if it was certainly armed before and nothing could have disarmed it by then; `mustnot`, and which step
    forbade it, if it was certainly disarmed or never armed; else `may`."""
    surely = perhaps = False
    why = "after-cancel"
    for arms, step in life:
        if step.type == "fail":
            continue
        if arms and step.completed <= due:
            surely = perhaps = True
        elif arms:
            perhaps = perhaps or step.invoked <= by
        elif step.completed < due:
            surely = perhaps = False
            why = DISARMS[step.f]
        elif step.invoked <= by:
            surely = False
    if by > end and surely:
        return "may", why
    return ("must" if surely else "may" if perhaps else "mustnot"), why


def _cancelled(history: History, one: Expected) -> None:
    """A cancel says itself what it came to, whenever it was."""
    effects = history.by_occurrence.get(one.occurrence, [])
    done = next((effect.at for effect in effects if effect.ok), float("inf"))
    for step in one.thing.steps:
        if step.f != "cancel" or step.type == "fail":
            continue
        outcome = step.body["outcome"] if step.type == "ok" else None
        if outcome == "prevented" and step.body["attempt"]:  # what had failed before is not tried again
            one.word, one.attempts = "may", step.body["attempt"]
            return
        if outcome == "prevented":
            one.word, one.why = "mustnot", "after-cancel"
            return
        if outcome == "in_flight":
            one.attempts = step.body["attempt"]
        if outcome == "already_done":
            created = [each for each in one.thing.steps if each.f == "create"]
            one.word, _ = classify(
                one.since, [(True, each) for each in created], deadline(history, one.since), history.end
            )
        elif one.word == "must" and step.invoked <= max(done, deadline(history, one.since)):
            one.word = "may"


def _manual(history: History, thing: Thing) -> list[Expected]:
    """What somebody triggered: one occurrence for each that was acknowledged, named by the answer."""
    found = []
    for step in thing.steps:
        if step.f != "trigger" or step.type != "ok":
            continue
        due = history.due(step.body["due_us"])
        one = Expected(thing, "manual", step.body["due_us"], due, max(due, step.completed), "must")
        ends = [later for later in thing.steps if later.f == "delete" and later.type != "fail"]
        by = deadline(history, one.since)
        if by > history.end or any(later.invoked <= by for later in ends):
            one.word = "may"
        _deleted(history, one)
        found.append(one)
    return found


def _deleted(history: History, one: Expected) -> None:
    """What had begun when its schedule was deleted is not tried again, be it refused or struck."""
    effects = history.by_occurrence.get(one.occurrence, [])
    if one.word != "must" or any(effect.ok for effect in effects):
        return
    for step in one.thing.steps:
        last = next((effect for effect in reversed(effects) if effect.at <= step.completed + EPSILON), None)
        if step.f != "delete" or step.type == "fail" or last is None:
            continue
        over = last.at + RUN if last.ended is None else last.ended
        struck = history.touching(last.at, over, *NODE_FAULTS, *STORE_FAULTS, node=last.node)
        if (struck or last.refused) and step.invoked <= deadline(history, over + one.thing.value["retry"]["delay"]):
            one.word = "may"
