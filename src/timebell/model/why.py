"""Explain the outcome of one occurrence in sentences, from recorded facts only. Pure."""

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

# A change and its audit record share a transaction, but not the timestamp: the two differ by at most this.
AUDIT_MATCH_TOLERANCE = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change in the audit log: instant, actor and action."""

    at: datetime
    actor: str
    action: str


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A recorded node, with its start and its latest heartbeat."""

    id: str
    name: str
    started_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class OccurrenceFacts:
    """The recorded facts about an occurrence.

    `schedule` is None once it was deleted. `rows` are the jobs of that instant, including range rows that cover it.
    `overlapping_jobs` are jobs of the schedule that were live when it was skipped. `pauses` maps paused queues to
    their reasons, with `*` for all firing. `adjacent_attempts` has the end of the tenant's last attempt before the
    instant, and of its first one after it.
    """

    schedule_id: str
    schedule: Schedule | None
    revisions: Sequence[Revision]
    rows: Sequence[Job] = ()
    overlapping_jobs: Sequence[Job] = ()
    audit_entries: Sequence[AuditEntry] = ()
    nodes: Sequence[KnownNode] = ()
    pauses: dict[str, str | None] = field(default_factory=dict)
    adjacent_attempts: tuple[datetime | None, datetime | None] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of one instant of a schedule.

    `outcome` is a job state, the reason of a skip, `none`, `due` or `lost`. `before` and `after` are the neighboring
    occurrences. Instants are aware UTC.
    """

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
        """Return the JSON form."""
        return {
            "scheduleId": self.schedule_id, "schedule": self.schedule, "at": format_instant(self.at),
            "occurrence": self.occurrence, "outcome": self.outcome, "revision": self.revision,
            "sentences": self.sentences, "before": _format_optional(self.before),
            "after": _format_optional(self.after), "jobs": self.jobs,
        }  # fmt: skip


def explain(facts: OccurrenceFacts, at: datetime, now: datetime) -> Explanation:
    """Explain the decisions and events that led to the outcome of the instant."""
    ordered = sorted(facts.revisions, key=lambda one: one.number)
    revision = next((one for one in reversed(ordered) if one.effective_at < at), None)
    recurrence = None if revision is None else revision.recurrence
    rows = sorted(facts.rows, key=lambda job: (job.kind != Kind.PLANNED, job.id))
    is_occurrence = recurrence is not None and recurrence.spec.delay is None and recurrence.has(at)
    before, after = _neighbors(recurrence or (ordered[0].recurrence if ordered else None), at)
    outcome = _outcome(rows)
    sentences = list(_describe_revision(facts, ordered, revision, at))
    if revision is not None:
        sentences += _describe_occurrence(facts, ordered, revision, at)
    for job in rows:
        sentences += _describe_job(facts, revision, job, at, now)
    if not rows and is_occurrence:
        outcome, sentence = _describe_undecided(facts, at, now)
        sentences.append(sentence)
    elif not rows:
        sentences += _describe_nearest(before, after)
    return Explanation(
        schedule_id=facts.schedule_id, schedule=facts.schedule.name if facts.schedule else facts.schedule_id, at=at,
        occurrence=is_occurrence or bool(rows), outcome=outcome, sentences=sentences,
        revision=None if revision is None else revision.number, before=before, after=after,
        jobs=[job.id for job in rows],
    )  # fmt: skip


def _describe_nearest(before: datetime | None, after: datetime | None) -> Iterator[str]:
    nearest = [_format(one) for one in (before, after) if one is not None]
    if nearest:
        yield f"The nearest occurrences are {' and '.join(nearest)}."


def _describe_revision(
    facts: OccurrenceFacts, ordered: Sequence[Revision], revision: Revision | None, at: datetime
) -> Iterator[str]:
    if revision is None:
        first = ordered[0].effective_at if ordered else None
        yield "The schedule did not exist then." + ("" if first is None else f" It was created at {_format(first)}.")
        return
    deleted = facts.schedule is None and revision is ordered[-1]
    by = _actor_note(facts, revision.effective_at)
    if deleted:
        yield f"The schedule was deleted at {_format(revision.effective_at)}{by}."
        return
    recurrence = revision.recurrence
    local = f"{recurrence.local(at):%Y-%m-%d %H:%M:%S} in {recurrence.timezone}"
    yield (
        f"{_format(at)} is {local}. Revision {revision.number}, created at {_format(revision.effective_at)}{by}, was in"
        f" effect: {recurrence.describe().rstrip('.')}."
    )


def _describe_occurrence(
    facts: OccurrenceFacts, ordered: Sequence[Revision], revision: Revision, at: datetime
) -> Iterator[str]:
    """Describe whether the instant is an occurrence of the revision, and what moved or excluded it."""
    recurrence = revision.recurrence
    if recurrence.spec.delay is not None:
        yield "The schedule has a fixed delay: each run determines the next one, so no instants are known in advance."
        return
    for one in recurrence.overrides:
        if at in (one.at, one.to):
            yield _describe_override(facts, ordered, one, at)
    if recurrence.has(at):
        note = recurrence.note(at)
        if note == "gap":
            yield "A clock change skips its local time on that day: it was moved out of the gap."
        elif note == "fold":
            yield "A clock change repeats its local time on that day."
        return
    yield "It is not an occurrence of that revision."
    yield from _describe_exclusion(recurrence, at)
    yield from _describe_other_revision(facts, ordered, revision, at)


def _describe_exclusion(recurrence: Recurrence, at: datetime) -> Iterator[str]:
    """Describe why the calendar, start or end of a recurrence excludes an instant, if one of them does."""
    spec = recurrence.spec
    if isinstance(spec, OnCalendar) and _without_calendar(recurrence, spec).has(at):
        name = spec.calendar.name
        yield f"The calendar{f' {name}' if name else ''} excludes that day (roll: {spec.roll})."
    elif recurrence.start is not None and at < recurrence.start:
        yield f"The schedule starts at {_format(recurrence.start)}."
    elif recurrence.end is not None and at >= recurrence.end:
        yield f"The schedule ended at {_format(recurrence.end)}."


def _describe_other_revision(
    facts: OccurrenceFacts, ordered: Sequence[Revision], revision: Revision, at: datetime
) -> Iterator[str]:
    """Describe the revision nearest to `revision` that has the instant, if there is one."""
    others = [one for one in ordered if one.recurrence.spec.delay is None and one.recurrence.has(at)]
    if not others:
        return
    other = min(others, key=lambda each: abs(each.number - revision.number))
    preposition = "until" if other.number < revision.number else "since"
    edit = other if other.number > revision.number else ordered[ordered.index(other) + 1]
    yield (
        f"It is an occurrence of revision {other.number}, in effect {preposition} the edit at"
        f" {_format(edit.effective_at)}{_actor_note(facts, edit.effective_at)}."
    )


def _without_calendar(recurrence: Recurrence, spec: OnCalendar) -> Recurrence:
    return replace(recurrence, spec=spec.spec, overrides=())


def _describe_override(facts: OccurrenceFacts, ordered: Sequence[Revision], override: Override, at: datetime) -> str:
    edit = next((each for each in ordered if override in each.recurrence.overrides), None)
    note = "" if edit is None else f" at {_format(edit.effective_at)}{_actor_note(facts, edit.effective_at)}"
    if override.to is None:
        return f"An override to skip it was set{note}."
    return f"An override to move it was set{note}: from {_format(override.at)} to {_format(override.to)}."


def _outcome(rows: Sequence[Job]) -> str:
    last = next((job for job in rows if job.reason != "rescheduled" and job.state is not JobState.SKIPPED), None)
    last = last or next(iter(rows), None)
    if last is None:
        return "none"
    return last.reason or "skipped" if last.state is JobState.SKIPPED else last.state.value


def _describe_undecided(facts: OccurrenceFacts, at: datetime, now: datetime) -> tuple[str, str]:
    """Return outcome and sentence of an occurrence without a job row."""
    schedule = facts.schedule
    if at > now:
        return "due", f"It is due in {_format_duration(at - now)}." + _pause_note(facts)
    if schedule is not None and schedule.next_fire_at is not None and schedule.next_fire_at <= at:
        if not schedule.enabled:
            return "due", "It is not decided yet." + _pause_note(facts)
        if "*" in facts.pauses:
            return "due", f"It is not decided yet: all firing is stopped{_reason_note(facts.pauses['*'])}."
        if schedule.error is not None:
            return "due", f"It is not decided yet: the schedule is errored, because {schedule.error}"
        return "due", f"It is not decided yet, {_format_duration(now - at)} late. {_describe_nodes(facts, at)}"
    return "lost", "No row records its outcome: it was deleted by retention, or lost. Run timebell audit."


def _pause_note(facts: OccurrenceFacts) -> str:
    schedule = facts.schedule
    if schedule is None or schedule.enabled:
        return ""
    since = "" if schedule.paused_at is None else f" since {_format(schedule.paused_at)}"
    by = "" if schedule.paused_at is None else _actor_note(facts, schedule.paused_at, "pause")
    return f" The schedule is paused{since}{by}{_reason_note(schedule.pause_reason)}."


def _describe_job(
    facts: OccurrenceFacts, revision: Revision | None, job: Job, at: datetime, now: datetime
) -> Iterator[str]:
    """Describe the creation, attempts and outcome of one job row."""
    if job.state is JobState.SKIPPED:
        subject = {Kind.MANUAL: "A manual run", Kind.BACKFILL: "A backfill"}.get(job.kind, "It")
        yield from _describe_skip(facts, revision, job, at, subject)
        return
    subject = {Kind.MANUAL: "A manual trigger", Kind.BACKFILL: "A backfill"}.get(job.kind, "The planner")
    yield f"{subject} created job {job.id} at {_format(job.created_at)}{_lateness_note(job.created_at - at)}."
    if job.kind is Kind.PLANNED and not job.attempt and job.run_at > max(at, job.created_at):
        yield f"Its start was set to {_format(job.run_at)}, by jitter, catch-up pace or rescheduling."
    for record in job.attempts:
        number, error = record.get("attempt", "?"), record.get("error") or record.get("code")
        target = f" to {record.get('to') or record['kind']}" if "kind" in record else ""
        if record.get("code") == "LEASE_LOST":
            by = _node_name(facts, record.get("reclaimedBy") or record.get("node"))
            on = f" on node {_node_name(facts, record.get('node'))}" if "reclaimedBy" in record else ""
            yield (
                f"Attempt {number} started at {record.get('startedAt')}{on}; its lease expired, and node {by} reclaimed"
                f" the job at {record.get('endedAt')}."
            )
        elif error is not None:
            yield f"Attempt {number}{target} failed: {error}"
        elif target:
            status = f", which responded with {record['status']}" if "status" in record else ""
            yield f"Attempt {number} was sent{target}{status}."
    if job.started_at is not None:
        node, lateness = _node_name(facts, job.node_id), _lateness_note(job.started_at - at)
        yield f"Attempt {job.attempt} started at {_format(job.started_at)}{lateness}, on node {node}."
    yield _describe_end(facts, job, now)


def _node_name(facts: OccurrenceFacts, id_: str | None) -> str:
    """Return the name of a node, or its id if it is not recorded."""
    return next((node.name for node in facts.nodes if node.id == id_), id_ or "?")


def _describe_end(facts: OccurrenceFacts, job: Job, now: datetime) -> str:
    if job.finished_at is not None:
        duration = "" if job.started_at is None else f" after {_format_duration(job.finished_at - job.started_at)}"
        ended = "was cancelled" if job.state is JobState.CANCELLED else job.state.value
        text = f"It {ended} at {_format(job.finished_at)}{duration}"
        text += f", because {job.reason}" if job.reason else ""
        text += f": {job.error}" if job.error else ""
        return text.rstrip(".") + (f"; job {job.replaced_by} replaced it." if job.replaced_by else ".")
    if job.hold is not None:
        return {
            Hold.OVERLAP: "It waits for other jobs of the schedule.",
            Hold.UNHANDLED: f"It waits for a node that handles topic {job.topic}: none does.",
            Hold.BACKLOG: "It is held as part of a backlog, until timebell release.",
            Hold.GROUP: "It waits: its group is at its concurrency limit.",
            Hold.TENANT: "It waits: its tenant is at its limit of running jobs, or of starts per minute.",
            Hold.STOPPING: "It is being stopped in favor of a later occurrence.",
            Hold.CANCELLING: "It is being stopped, because it was cancelled.",
        }[job.hold]
    if job.state is not JobState.PENDING:
        return "It is running."
    for name in ("*", job.queue):
        if name in facts.pauses:
            scope = "all firing" if name == "*" else f"the queue {name}"
            return f"It waits: {scope} is paused{_reason_note(facts.pauses[name])}."
    return (
        f"It starts in {_format_duration(job.run_at - now)}."
        if job.run_at > now
        else "It is due, and no node has claimed it."
    )


def _describe_skip(
    facts: OccurrenceFacts, revision: Revision | None, job: Job, at: datetime, subject: str
) -> Iterator[str]:
    decided = job.finished_at or job.created_at
    others = (
        ""
        if job.skipped_count == 1
        else f", with {job.skipped_count - 1:,} others up to {_format(job.skipped_to or at)}"
    )
    lateness = _lateness_note(decided - at)
    yield f"{subject} was skipped ({job.reason}){others}; this was decided at {_format(decided)}{lateness}."
    match job.reason:
        case Reason.PAUSED:
            yield from _describe_pause(facts, job, at, decided)
        case Reason.OVERLAP:
            yield from _describe_overlap(facts, revision)
        case Reason.CONDITION:
            yield from _describe_condition((job.result or {}).get("condition") or {})
        case Reason.QUOTA if job.error is not None:
            yield f"{job.error}."
        case Reason.MISSED | Reason.COALESCED | Reason.EXPIRED:
            yield _describe_nodes(facts, at)
            if revision is not None:
                yield _describe_catch_up(revision, job)


def _describe_pause(facts: OccurrenceFacts, job: Job, at: datetime, decided: datetime) -> Iterator[str]:
    """Describe from when to when the schedule was paused, and by whom."""
    pauses = [entry for entry in facts.audit_entries if entry.action.endswith(".pause")]
    pause = next((entry for entry in reversed(pauses) if entry.at <= at + AUDIT_MATCH_TOLERANCE), None)
    resumes = (entry for entry in facts.audit_entries if entry.action.endswith(".resume") and entry.at >= at)
    resume = next(resumes, None)
    start = "" if pause is None else f" from {_format(pause.at)} (by {pause.actor})"
    end = f" until {_format(decided)} at the latest"
    if resume is not None:
        end = f" to {_format(resume.at)} (by {resume.actor})"
    yield f"The schedule was paused{start}{end}." + _pause_note(facts)
    if job.error is not None and (facts.schedule is None or facts.schedule.enabled):
        yield f"{job.error}."


def _describe_overlap(facts: OccurrenceFacts, revision: Revision | None) -> Iterator[str]:
    """Describe the jobs that were live, and the policy."""
    for other in facts.overlapping_jobs:
        end = f"it finished at {_format(other.finished_at)}" if other.finished_at else "it still is not"
        yield f"Job {other.id} of {_format(other.scheduled_at)} was not finished at that time ({end})."
    if revision is not None:
        yield f"The overlap policy of the schedule is {revision.policies.overlap}."


def _describe_condition(verdict: dict[str, Any]) -> Iterator[str]:
    """Describe the comparison that failed and the query that returned a row."""
    if (failed := verdict.get("failed")) is not None:
        operand = f" {dumps(failed['value'])}" if "value" in failed else ""
        actual = dumps(verdict["inputs"].get(failed["field"])) if isinstance(verdict["inputs"], dict) else "not stored"
        yield f"Its condition {failed['field']} {failed['op']}{operand} did not hold: the value was {actual}."
    if (unless := verdict.get("unless", {})).get("found"):
        parameters = ", ".join(f":{name} = {dumps(value)}" for name, value in unless["parameters"].items())
        yield f"Its query (unless) returned a row{', for ' + parameters if parameters else ''}."


def _describe_catch_up(revision: Revision, job: Job) -> str:
    policies = revision.policies
    if job.reason == Reason.COALESCED:
        return "The catch-up policy is latest: one later occurrence ran instead of all missed ones."
    if job.reason == Reason.EXPIRED:
        return "It expired: when_late is expire, or expires_after had passed."
    limits = f"within {_format_duration(timedelta(seconds=policies.catch_up_window))}"
    if policies.catch_up is CatchUp.ALL:
        limits += f", at most {policies.catch_up_limit}"
    effect = "skips missed occurrences" if policies.catch_up is CatchUp.SKIP else f"runs missed occurrences {limits}"
    return (
        f"The catch-up policy, {policies.catch_up}, {effect}; an occurrence is missed when more than"
        f" {policies.missed_after:g} s late."
    )


def _describe_nodes(facts: OccurrenceFacts, at: datetime) -> str:
    """Describe the nodes recorded around the instant. Rows of stopped nodes are deleted, so absence proves nothing."""
    alive = [node for node in facts.nodes if node.started_at <= at <= node.last_seen_at]
    if alive:
        names = ", ".join(node.name for node in alive)
        return f"These nodes were alive before and after that instant: {names}."
    earlier = [
        f"{node.name} was last seen at {_format(node.last_seen_at)}" for node in facts.nodes if node.last_seen_at < at
    ]
    later = [f"{node.name} started at {_format(node.started_at)}" for node in facts.nodes if node.started_at > at]
    others = f": {'; '.join([*earlier, *later])}" if earlier or later else ""
    text = f"No recorded node was alive at that instant{others}."
    before, after = facts.adjacent_attempts
    if before is not None and after is not None:
        text += (
            f" No attempt ended between {_format(before)} and {_format(after)}, for {_format_duration(after - before)}."
        )
    return text


def _neighbors(recurrence: Recurrence | None, at: datetime) -> tuple[datetime | None, datetime | None]:
    if recurrence is None or recurrence.spec.delay is not None:
        return None, None
    before = after = None
    with suppress(InvalidRecurrence):
        before = recurrence.previous(at)
    with suppress(InvalidRecurrence):
        after = recurrence.next(at)
    return before, after


def _actor_note(facts: OccurrenceFacts, at: datetime, action_suffix: str = "") -> str:
    """Return the actor and action of the change at an instant, if the audit log has it."""
    near = [
        act for act in facts.audit_entries if abs(act.at - at) <= AUDIT_MATCH_TOLERANCE and action_suffix in act.action
    ]
    closest = min(near, key=lambda act: abs(act.at - at), default=None)
    return "" if closest is None else f" by {closest.actor} ({closest.action})"


def _reason_note(reason: str | None) -> str:
    return f", because: {reason}" if reason else ""


def _lateness_note(lateness: timedelta) -> str:
    return f", {_format_duration(lateness)} late" if lateness >= timedelta(milliseconds=1) else ""


def _format_duration(duration: timedelta) -> str:
    """Format a duration in one or two units."""
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = (int(seconds // size) for size in (60, 3600, 86_400))
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if days < 2 else f"{days} d {hours % 24} h"


def _format(at: datetime) -> str:
    """Format with milliseconds; a sentence needs no more."""
    return format_instant(at.replace(microsecond=at.microsecond // 1000 * 1000)).replace("000Z", "Z")


def _format_optional(at: datetime | None) -> str | None:
    return None if at is None else format_instant(at)
