"""Why one occurrence went as it went, told from what is recorded. Pure; what is not recorded is not guessed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from json import dumps
from typing import Any

from timebell.errors import InvalidRecurrence
from timebell.model.job import Hold, Job, JobState, Kind, Reason
from timebell.model.policy import CatchUp
from timebell.model.schedule import Revision, Schedule
from timebell.recurrence import OnCalendar, Override, Recurrence
from timebell.recurrence.instants import format_instant

SAME = timedelta(seconds=10)  # a change and its audit record are of one transaction, begun so long before at most


@dataclass(frozen=True, slots=True)
class Act:
    """Who changed something, when, as the audit log has it."""

    at: datetime
    actor: str
    action: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A node that is known: since when, and when it was seen last."""

    id: str
    name: str
    started_at: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is recorded of an occurrence. `schedule` is None once it was deleted; `rows` are of that instant, range
    rows over it too; `beside` are jobs of the schedule that lived when it was left out; `stopped` are pauses of queues
    and their reasons, `*` for all firing; `around` is when the last attempt of the tenant before it ended, and the
    first one after it."""

    schedule_id: str
    schedule: Schedule | None
    revisions: Sequence[Revision]
    rows: Sequence[Job] = ()
    beside: Sequence[Job] = ()
    acts: Sequence[Act] = ()
    nodes: Sequence[Seen] = ()
    stopped: dict[str, str | None] = field(default_factory=dict)
    around: tuple[datetime | None, datetime | None] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What became of one instant of a schedule. `outcome` is a state, the reason of a skip, or none, due, lost."""

    schedule_id: str
    schedule: str
    at: datetime
    occurrence: bool
    outcome: str
    sentences: list[str]
    revision: int | None = None
    before: datetime | None = None
    after: datetime | None = None
    jobs: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "scheduleId": self.schedule_id, "schedule": self.schedule, "at": format_instant(self.at),
            "occurrence": self.occurrence, "outcome": self.outcome, "revision": self.revision,
            "sentences": self.sentences, "before": _text(self.before), "after": _text(self.after), "jobs": self.jobs,
        }  # fmt: skip


def explain(facts: Facts, at: datetime, now: datetime) -> Why:
    """The chain that led to what became of the instant, in sentences."""
    ordered = sorted(facts.revisions, key=lambda one: one.number)
    held = [one for one in ordered if one.effective_at < at]
    revision = held[-1] if held else None
    rows = sorted(facts.rows, key=lambda job: (job.kind != Kind.PLANNED, job.id))
    recurrence = None if revision is None else revision.recurrence
    known = recurrence is not None and (recurrence.spec.delay is None and recurrence.has(at))
    sentences = list(_in_force(facts, ordered, revision, at))
    sentences += _occurrence(facts, ordered, revision, at) if recurrence is not None else ()
    for job in rows:
        sentences += _job(facts, revision, job, at, now)
    outcome = _outcome(rows)
    if not rows and known:
        outcome, said = _undecided(facts, at, now)
        sentences.append(said)
    near = _near(recurrence or (ordered[0].recurrence if ordered else None), at)
    if not known and not rows:
        sentences += [f"The nearest ones are {' and '.join(_z(one) for one in near if one)}."] if any(near) else []
    return Why(
        schedule_id=facts.schedule_id, schedule=facts.schedule.name if facts.schedule else facts.schedule_id, at=at,
        occurrence=known or bool(rows), outcome=outcome, sentences=sentences,
        revision=None if revision is None else revision.number, before=near[0], after=near[1],
        jobs=[job.id for job in rows],
    )  # fmt: skip


def _in_force(facts: Facts, ordered: Sequence[Revision], revision: Revision | None, at: datetime) -> Iterator[str]:
    if revision is None:
        first = ordered[0].effective_at if ordered else None
        yield "The schedule did not exist then." + ("" if first is None else f" It was made at {_z(first)}.")
        return
    deleted = facts.schedule is None and revision is ordered[-1]
    by = _by(facts, revision.effective_at)
    if deleted:
        yield f"The schedule was deleted at {_z(revision.effective_at)}{by}."
        return
    recurrence = revision.recurrence
    local = f"{recurrence.local(at):%Y-%m-%d %H:%M:%S} in {recurrence.timezone}"
    yield (
        f"{_z(at)} is {local}. Revision {revision.number} held then, made at {_z(revision.effective_at)}{by}:"
        f" {recurrence.describe().rstrip('.')}."
    )


def _occurrence(facts: Facts, ordered: Sequence[Revision], revision: Revision | None, at: datetime) -> Iterator[str]:
    """Whether the instant is one of the revision's, and what moved it there or left it out."""
    assert revision is not None
    recurrence = revision.recurrence
    if recurrence.spec.delay is not None:
        yield "It is a fixed delay: each run sets the next, so no instants are known ahead."
        return
    for one in recurrence.overrides:
        if at in (one.at, one.to):
            yield _overridden(facts, ordered, one, at)
    if recurrence.has(at):
        note = recurrence.note(at)
        if note == "gap":
            yield "Its local time does not exist on that day, as clocks jump over it: it was moved out of the gap."
        elif note == "fold":
            yield "Clocks show its local time twice on that day."
        return
    yield "It is no occurrence of that revision."
    spec = recurrence.spec
    if isinstance(spec, OnCalendar) and _plain(recurrence, spec).has(at):
        name = spec.calendar.name
        yield f"The calendar{f' {name}' if name else ''} leaves that day out (roll: {spec.roll})."
    elif recurrence.start is not None and at < recurrence.start:
        yield f"It begins at {_z(recurrence.start)}."
    elif recurrence.end is not None and at >= recurrence.end:
        yield f"It ended at {_z(recurrence.end)}."
    others = [one for one in ordered if one.recurrence.spec.delay is None and one.recurrence.has(at)]
    if others:
        other = min(others, key=lambda each: abs(each.number - revision.number))
        when = "was, until an edit" if other.number < revision.number else "is, since an edit"
        edit = other if other.number > revision.number else ordered[ordered.index(other) + 1]
        yield f"It {when} at {_z(edit.effective_at)}{_by(facts, edit.effective_at)}: one of revision {other.number}."


def _plain(recurrence: Recurrence, spec: OnCalendar) -> Recurrence:
    return replace(recurrence, spec=spec.spec, overrides=())


def _overridden(facts: Facts, ordered: Sequence[Revision], one: Override, at: datetime) -> str:
    made = next((each for each in ordered if one in each.recurrence.overrides), None)
    who = "" if made is None else f" at {_z(made.effective_at)}{_by(facts, made.effective_at)}"
    if one.to is None:
        return f"Somebody had asked to skip it{who}."
    return f"Moved{who}: from {_z(one.at)} to {_z(one.to)}."


def _outcome(rows: Sequence[Job]) -> str:
    last = next((job for job in rows if job.reason != "rescheduled" and job.state is not JobState.SKIPPED), None)
    last = last or next(iter(rows), None)
    if last is None:
        return "none"
    return last.reason or "skipped" if last.state is JobState.SKIPPED else last.state.value


def _undecided(facts: Facts, at: datetime, now: datetime) -> tuple[str, str]:
    """Of an occurrence without a row."""
    one = facts.schedule
    if at > now:
        return "due", f"It is to come, in {_span(at - now)}." + _paused(facts)
    if one is not None and one.next_fire_at is not None and one.next_fire_at <= at:
        if not one.enabled:
            return "due", "It is not decided yet." + _paused(facts)
        if "*" in facts.stopped:
            return "due", f"It is not decided yet: all firing is stopped{_because(facts.stopped['*'])}."
        if one.fault is not None:
            return "due", f"It is not decided yet: the schedule was set aside, because {one.fault}"
        return "due", f"It is not decided yet, {_span(now - at)} late. {_alive(facts, at)}"
    return "lost", "No row says what became of it: it was forgotten by retention, or lost. Run timebell audit."


def _paused(facts: Facts) -> str:
    one = facts.schedule
    if one is None or one.enabled:
        return ""
    since = "" if one.paused_at is None else f" since {_z(one.paused_at)}"
    by = "" if one.paused_at is None else _by(facts, one.paused_at, "pause")
    return f" The schedule is paused{since}{by}{_because(one.pause_reason)}."


def _job(facts: Facts, revision: Revision | None, job: Job, at: datetime, now: datetime) -> Iterator[str]:
    """What one row says."""
    what = {Kind.MANUAL: "A run by hand", Kind.BACKFILL: "A backfill"}.get(job.kind, "It")
    if job.state is JobState.SKIPPED:
        yield from _skipped(facts, revision, job, at, what)
        return
    made = "became a job" if job.kind is Kind.PLANNED else "made a job of it"
    yield f"{what} {made} ({job.id}) at {_z(job.created_at)}{_late(job.created_at - at)}."
    if job.kind is Kind.PLANNED and not job.attempt and job.run_at > max(at, job.created_at):
        yield f"Its start was set to {_z(job.run_at)}, by jitter, pace or a change of its time."
    for tried in job.attempts:
        number, error = tried.get("attempt", "?"), tried.get("error") or tried.get("code")
        sent = f" to {tried.get('to') or tried['kind']}" if "kind" in tried else ""
        if tried.get("code") == "LEASE_LOST":
            by = _node(facts, tried.get("node"))
            yield (
                f"Attempt {number} began at {tried.get('startedAt')}; its lease was not renewed any more, and node {by}"
                f" took the job back at {tried.get('endedAt')}."
            )
        elif error is not None or not sent:
            yield f"Attempt {number}{sent} failed: {error or 'it failed'}"
        else:
            status = f", which answered {tried['status']}" if "status" in tried else ""
            yield f"Attempt {number} was sent{sent}{status}."
    if job.started_at is not None:
        on = _node(facts, job.node_id)
        yield f"Attempt {job.attempt} began at {_z(job.started_at)}{_late(job.started_at - at)}, on node {on}."
    yield _end(facts, job, now)


def _node(facts: Facts, id_: str | None) -> str:
    """A node by name, as long as it is known."""
    return next((node.name for node in facts.nodes if node.id == id_), id_ or "?")


def _end(facts: Facts, job: Job, now: datetime) -> str:
    if job.finished_at is not None:
        took = "" if job.started_at is None else f" after {_span(job.finished_at - job.started_at)}"
        ended = "was cancelled" if job.state is JobState.CANCELLED else job.state.value
        said = f"It {ended} at {_z(job.finished_at)}{took}"
        said += f", because {job.reason}" if job.reason else ""
        said += f": {job.error}" if job.error else ""
        return said.rstrip(".") + (f"; job {job.replaced_by} took its place." if job.replaced_by else ".")
    if job.hold is not None:
        return {
            Hold.OVERLAP: "It waits for its turn, behind other jobs of the schedule.",
            Hold.UNHEARD: f"It waits for a node that listens to {job.topic}: none does.",
            Hold.RECOVER: "It waits for timebell recover: the outage left too much to be made up for unasked.",
            Hold.GROUP: "It waits for its turn, as many of its group run as may.",
            Hold.TENANT: "It waits: its tenant has as many running, or has started as many this minute, as it may.",
            Hold.STOPPING: "It was asked to stop, to make way for a later occurrence.",
        }[job.hold]
    if job.state is not JobState.PENDING:
        return "It runs now."
    for name in ("*", job.queue):
        if name in facts.stopped:
            whose = "all firing" if name == "*" else f"the queue {name}"
            return f"It waits: {whose} is paused{_because(facts.stopped[name])}."
    return (
        f"It is to start in {_span(job.run_at - now)}." if job.run_at > now else "It is due, and no node has taken it."
    )


def _skipped(facts: Facts, revision: Revision | None, job: Job, at: datetime, what: str) -> Iterator[str]:
    decided = job.finished_at or job.created_at
    many = "" if job.skipped_count == 1 else f", with {job.skipped_count - 1:,} others up to {_z(job.skipped_to or at)}"
    yield f"{what} was skipped ({job.reason}){many}; that was decided at {_z(decided)}{_late(decided - at)}."
    if job.reason == Reason.PAUSED:
        pause = [act for act in facts.acts if act.action.endswith(".pause") and act.at <= at + SAME]
        resume = [act for act in facts.acts if act.action.endswith(".resume") and act.at >= at]
        from_ = f" from {_z(pause[-1].at)} (by {pause[-1].actor})" if pause else ""
        to = f" to {_z(resume[0].at)} (by {resume[0].actor})" if resume else f" until {_z(decided)} at the latest"
        yield f"The schedule was paused then{from_}{to}." + _paused(facts)
        if job.error is not None and (facts.schedule is None or facts.schedule.enabled):
            yield f"{job.error}."
    elif job.reason == Reason.OVERLAP:
        for other in facts.beside:
            until = f"until {_z(other.finished_at)}" if other.finished_at else "and still is"
            yield f"Job {other.id} of {_z(other.scheduled_at)} was not finished then ({until})."
        if revision is not None:
            yield f"The schedule's overlap is {revision.policies.overlap}."
    elif job.reason == Reason.CONDITION:
        yield from _ruled((job.result or {}).get("condition") or {})
    elif job.reason == Reason.QUOTA and job.error is not None:
        yield f"{job.error}."
    elif job.reason in (Reason.MISSED, Reason.COALESCED, Reason.EXPIRED):
        yield _alive(facts, at)
        if revision is not None:
            yield _caught_up(revision, job)


def _ruled(verdict: dict[str, Any]) -> Iterator[str]:
    """What its condition looked at when it was asked."""
    if (failed := verdict.get("failed")) is not None:
        wanted = f" {dumps(failed['value'])}" if "value" in failed else ""
        found = dumps(verdict["inputs"].get(failed["field"])) if isinstance(verdict["inputs"], dict) else "not kept"
        yield f"Its condition did not hold: {failed['field']} {failed['op']}{wanted} was asked, and it was {found}."
    if (unless := verdict.get("unless", {})).get("found"):
        given = ", ".join(f":{name} = {dumps(value)}" for name, value in unless["parameters"].items())
        yield f"Its query (unless) found something{', for ' + given if given else ''}."


def _caught_up(revision: Revision, job: Job) -> str:
    policies = revision.policies
    if job.reason == Reason.COALESCED:
        return "Its catch-up is latest: a later occurrence ran for all of them."
    if job.reason == Reason.EXPIRED:
        return "It is anchored or had an expires_after: late, it was void."
    limits = f"within {_span(timedelta(seconds=policies.catch_up_window))}"
    if policies.catch_up is CatchUp.ALL:
        limits += f", at most {policies.catch_up_limit}"
    said = "leaves out whatever was missed" if policies.catch_up is CatchUp.SKIP else f"makes up for what lies {limits}"
    return f"Its catch-up, {policies.catch_up}, {said}; missed is what is more than {policies.missed_after:g} s late."


def _alive(facts: Facts, at: datetime) -> str:
    """What is known of who could have fired it. Rows of nodes that stopped are gone, so absence is no proof."""
    there = [node for node in facts.nodes if node.started_at <= at <= node.seen_at]
    if there:
        names = ", ".join(node.name for node in there)
        return f"These nodes are known to have been alive before and after that: {names}."
    gone = [f"{node.name} was last seen at {_z(node.seen_at)}" for node in facts.nodes if node.seen_at < at]
    came = [f"{node.name} started at {_z(node.started_at)}" for node in facts.nodes if node.started_at > at]
    said = f"No node is known that was alive then{': ' if gone or came else ''}{'; '.join([*gone, *came])}."
    before, after = facts.around
    if before is not None and after is not None:
        said += f" No attempt ended between {_z(before)} and {_z(after)}, for {_span(after - before)}."
    return said


def _near(recurrence: Recurrence | None, at: datetime) -> tuple[datetime | None, datetime | None]:
    if recurrence is None or recurrence.spec.delay is not None:
        return None, None
    before = after = None
    with suppress(InvalidRecurrence):
        before = recurrence.previous(at)
    with suppress(InvalidRecurrence):
        after = recurrence.next(at)
    return before, after


def _by(facts: Facts, at: datetime, word: str = "") -> str:
    """Who did what was done at an instant, if the audit log knows."""
    near = [act for act in facts.acts if abs(act.at - at) <= SAME and word in act.action]
    found = min(near, key=lambda act: abs(act.at - at), default=None)
    return "" if found is None else f" by {found.actor} ({found.action})"


def _because(reason: str | None) -> str:
    return f", because: {reason}" if reason else ""


def _late(by: timedelta) -> str:
    return f", {_span(by)} late" if by >= timedelta(milliseconds=1) else ""


def _span(span: timedelta) -> str:
    """A length of time in one or two units."""
    seconds = span.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = (int(seconds // size) for size in (60, 3600, 86_400))
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if days < 2 else f"{days} d {hours % 24} h"


def _z(at: datetime) -> str:
    return format_instant(at)


def _text(at: datetime | None) -> str | None:
    return None if at is None else format_instant(at)
