"""The verbs for jobs: schedule one or many, cancel, get, list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any, NamedTuple

from timebell import tracing
from timebell.alarm import Alarm
from timebell.client import datetimes
from timebell.client.validation import (
    Accepted,
    group_name,
    job_uuid,
    labelled,
    no_such_job,
    payload_of,
    queue_name,
    text,
    unknown_options,
    urgency,
    uuid_of,
)
from timebell.clock import Clock
from timebell.errors import Conflict, InThePast, InvalidInput, InvalidPayload
from timebell.ids import new_ids
from timebell.model import page, preconditions
from timebell.model.job import STATE_WORDS, Alike, Job, JobState, Kind, NewJob
from timebell.model.page import Page
from timebell.model.payload import encode
from timebell.model.policy import Retry, seconds
from timebell.model.routes import route
from timebell.store.dialects.base import Store
from timebell.store.jobs import bind_targets, dead_letters, erasure, repository
from timebell.targets.handler import check_topic
from timebell.targets.payloads import VERSION, plain

# A job due sooner than this makes other nodes look again; for later ones their next heartbeat is in time.
SOON = timedelta(seconds=10)
OWN_KINDS = ("campaign", "alert")  # targets of jobs that nobody but Timebell makes


@dataclass(slots=True, kw_only=True)
class JobSpec:
    """One job to be made; the fields are the arguments of `Timebell.schedule_at`."""

    topic: str
    run_at: datetime | str | None = None
    timezone: str | None = None
    payload: Any = None
    owner_id: str | None = None
    tenant_id: str | None = None
    correlation_id: str | None = None
    client_request_id: str | None = None
    metadata: Mapping[str, Any] | None = None
    key: str | None = None
    retry: Retry | Mapping[str, Any] | None = None
    timeout: float | timedelta | None = None
    queue: str = "default"
    priority: int = 0
    group: str | None = None
    condition: Any = None
    unless: Mapping[str, str] | None = None
    expires_after: float | timedelta | None = None
    target: Mapping[str, Any] | str | None = None
    on_gap: str = "shift"
    on_fold: str = "first"


def _listed(specs: Any) -> list[JobSpec]:
    """Specs as a list. Raises InvalidInput (SPEC_INVALID)."""
    given = list(specs) if isinstance(specs, Iterable) and not isinstance(specs, str | Mapping) else None
    if given is None or not all(isinstance(one, JobSpec) for one in given):
        raise InvalidInput(
            f"schedule_many was given {specs!r:.60}.", code="SPEC_INVALID",
            fix='Give a list of JobSpecs: [JobSpec(topic="mail.send", payload={"to": "ana"}), ...].',
        )  # fmt: skip
    return given


def spec_of(**fields: Any) -> JobSpec:
    """The JobSpec of what `schedule_at` was given. Raises InvalidInput (UNKNOWN_OPTION)."""
    known = JobSpec.__slots__
    if unknown := [name for name in fields if name not in known]:
        raise unknown_options("schedule_at", unknown, known)
    return JobSpec(**fields)


class Jobs:
    """The verbs. `opened` makes sure that the store is open; `check_target` validates targets, `accepted` payloads;
    `typed` says whether any handler knows what those of a topic are."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        working: Alarm,
        opened: Callable[[], Any],
        check_target: Callable[[Any], dict[str, Any] | None],
        accepted: Accepted,
        default_timezone: str | None,
        typed: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._clock = clock
        self._working = working
        self._opened = opened
        self._check_target = check_target
        self._accepted = accepted
        self._default_timezone = default_timezone
        self._typed = typed

    async def create(
        self, specs: Iterable[JobSpec], *, on_conflict: str = "error", connection: Any = None
    ) -> Sequence[NewJob | str] | Alike:
        """Write jobs, all or none: each as it was written, or the id of the one that stands for it (`keep`).

        Raises InvalidInput before anything is written; Conflict.
        """
        if on_conflict not in ("error", "keep", "replace"):
            raise InvalidInput(
                f"on_conflict is {on_conflict!r}.", code="INVALID_ON_CONFLICT", fix="Use error, keep or replace."
            )
        specs = _listed(specs)
        await self._opened()
        now = self._clock.now()
        if not specs:
            return []
        ids = new_ids(now, len(specs))
        with tracing.creating((str(spec.topic) for spec in specs), ids):
            return await self._create(specs, ids, now, on_conflict, connection)

    async def _create(
        self, specs: list[JobSpec], ids: list[str], now: datetime, on_conflict: str, connection: Any
    ) -> Sequence[NewJob | str] | Alike:
        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        if connection is None and (alike := self._draft_alike(specs, ids, now)) is not None:
            await self._written(call, alike, on_conflict, now + SOON)
            return alike
        new: list[NewJob] = []
        asked_before: dict[str, str] = {}
        pattern: _Pattern | None = None
        for spec, id_ in zip(specs, ids, strict=True):
            try:
                job = None if pattern is None else self._draft_like(pattern, spec, id_, now)
                if job is None:
                    job = self.draft(spec, id_, now)
                    pattern = _Pattern.of(spec, job)
                new.append(job)
            except InThePast:  # unless it repeats, late, what was asked in time
                if (made_then := await self._asked_before(spec, on_conflict, call)) is None:
                    raise
                asked_before[id_] = made_then
        existing = await self._written(call, new, on_conflict, now + SOON, bulk=connection is None and len(new) > 1)
        if not existing and not asked_before:
            return [*new]
        made: dict[str, NewJob | str] = {job.id: existing.get(job.id, job) for job in new}
        made |= asked_before
        return [made[id_] for id_ in ids]

    async def _written(
        self, call: Any, new: list[NewJob] | Alike, on_conflict: str, soon: datetime, *, bulk: bool = False
    ) -> dict[str, str]:
        """Write drafts, as `ledger.create`."""
        if not len(new):
            return {}
        existing: dict[str, str] = await call(repository.create, new, on_conflict, soon, bulk=bulk)
        if repository.soonest(new) <= soon:
            self._working.poke_threadsafe()
        return existing

    async def _asked_before(self, spec: JobSpec, on_conflict: str, call: Any) -> str | None:
        """The job that a spec's request id made, if there is one. Raises Conflict as for any repeated request."""
        labels = labelled(spec.metadata, {"client_request_id": spec.client_request_id})
        if (request_id := labels.get("client_request_id")) is None:
            return None
        tenant_id = "default" if spec.tenant_id is None else text(spec.tenant_id, "tenant_id")
        found: str | None = await call(repository.requested, tenant_id, request_id, on_conflict)
        return found

    def draft(self, spec: JobSpec, id_: str, now: datetime, default_timezone: str | None = None) -> NewJob:
        """A spec, checked, as a row to write. Raises InvalidInput, Refused."""
        default = default_timezone or self._default_timezone
        when = datetimes.read(spec.run_at, spec.timezone, default, now, spec.on_gap, spec.on_fold)
        target = self._check_target(spec.target)
        by_name = None if target is None else target.get("name")
        given = {
            "owner_id": spec.owner_id, "correlation_id": spec.correlation_id,
            "client_request_id": spec.client_request_id,
        }  # fmt: skip
        metadata = tracing.context_to_keep() | labelled(spec.metadata, given)
        expires = None
        if spec.expires_after is not None:
            expires = when.at + timedelta(seconds=seconds(spec.expires_after, "expires_after"))
        retry = Retry.read(spec.retry)
        topic = check_topic(spec.topic)
        payload, metadata = payload_of(topic, spec.payload, metadata, target, self._accepted)
        tenant_id = "default" if spec.tenant_id is None else text(spec.tenant_id, "tenant_id")
        return NewJob(
            id=id_, tenant_id=tenant_id, topic=topic,
            scheduled_at=when.at, created_at=now, **when.fields(),
            payload=payload, metadata=encode(metadata, "metadata") if metadata else None,
            owner_id=metadata.get("owner_id"), key=None if spec.key is None else text(spec.key, "key"),
            request_id=metadata.get("client_request_id"), kind=Kind.ONCE,
            target=encode(target, "target") if target else None, named=by_name,
            route=route(topic, target) if by_name is None else "",
            queue=queue_name(spec.queue), priority=urgency(spec.priority),
            group=group_name(spec.group), conditions=preconditions.kept(spec.condition, spec.unless),
            retry=encode(retry.to_json()) if retry else None,
            timeout=None if spec.timeout is None else seconds(spec.timeout, "timeout", least=0.001),
            expires_at=expires,
        )  # fmt: skip

    def _draft_like(self, pattern: _Pattern, spec: JobSpec, id_: str, now: datetime) -> NewJob | None:
        """As `draft`, of a spec that has nothing but a time and a payload of its own; None if it has more."""
        if not _like(spec, pattern.spec):
            return None
        like = pattern.job
        when = datetimes.read(spec.run_at, spec.timezone, self._default_timezone, now, spec.on_gap, spec.on_fold)
        payload, metadata = self._accepted(like.topic, spec.payload, {})
        if metadata:
            return None
        return NewJob(
            id=id_, tenant_id=like.tenant_id, topic=like.topic, scheduled_at=when.at, created_at=now, **when.fields(),
            payload=payload, route=like.route, queue=like.queue, priority=like.priority, group=like.group,
            conditions=like.conditions, retry=like.retry, timeout=like.timeout,
        )  # fmt: skip

    def _draft_alike(self, specs: list[JobSpec], ids: list[str], now: datetime) -> Alike | None:
        """All at once, if each of them has nothing but a time and a payload of its own, and all is well with it; None
        if they have to be drafted one by one."""
        first = specs[0]
        if len(specs) == 1 or not all(map(_like, specs, repeat(first))):
            return None
        times = datetimes.read_alike([spec.run_at for spec in specs], now)
        if times is None:
            return None
        like = self.draft(first, ids[0], now)
        if _Pattern.of(first, like) is None or self._typed(like.topic):
            return None
        return Alike(like, ids, times, [encode(plain(spec.payload)) for spec in specs])

    async def nowhere(self, new: Sequence[NewJob]) -> set[str]:
        """The ids of drafts for a target that there is not."""
        if not any(job.named for job in new):
            return set()
        await self._opened()
        return await self._store.run(bind_targets.unknown, new)

    async def take_in(self, new: Sequence[NewJob]) -> int:
        """Write drafts of which each has a client request id; how many of them were there already."""
        await self._opened()
        soon = self._clock.now() + SOON
        existing = await self._store.run(repository.create, new, "keep", soon) if new else {}
        if any(job.run_at <= soon for job in new):
            self._working.poke_threadsafe()
        return len(existing)

    async def cancel(self, job_id: str, tenant_id: str | None = None, connection: Any = None) -> repository.Cancelled:
        """Keep a job from starting, if that is still possible. Raises NotFound for an unknown id."""
        await self._opened()
        id_ = job_uuid(job_id)
        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        result = await call(repository.cancel, tenant_id, id_, self._clock.now())
        if result is None:
            raise no_such_job(job_id)
        return result  # type: ignore[no-any-return]

    async def sweep(self, equal: Mapping[str, Any], tenant_id: str) -> repository.Swept:
        """Cancel all live jobs with these values, a thousand a transaction. Raises InvalidInput (FILTER_MISSING)."""
        await self._opened()
        wanted = {name: value for name, value in equal.items() if value is not None}
        if not wanted:
            raise InvalidInput(
                "Nothing says which jobs to cancel.", code="FILTER_MISSING",
                fix="Give at least one of key, owner_id, topic, schedule_id, queue.",
            )  # fmt: skip
        if "schedule_id" in wanted and (id_ := uuid_of(wanted["schedule_id"])) is None:
            return repository.Swept()
        if "schedule_id" in wanted:
            wanted["schedule_id"] = id_
        prevented = in_flight = 0
        after: str | None = None
        while True:
            where = wanted | {"tenant_id": tenant_id}
            swept, after = await self._store.run(repository.sweep, where, self._clock.now(), after, 1000)
            prevented, in_flight = prevented + swept.prevented, in_flight + swept.in_flight
            if after is None:
                return repository.Swept(prevented, in_flight)

    async def reschedule(
        self, job_id: str, run_at: datetime | str | None, timezone: str | None, tenant_id: str | None,
        connection: Any = None,
    ) -> NewJob:  # fmt: skip
        """A new job in place of a pending one. Raises InvalidInput, NotFound, Conflict."""
        await self._opened()
        now = self._clock.now()

        def read_time(own: str) -> dict[str, Any]:
            return datetimes.read(run_at, timezone, own, now).fields()

        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        new: NewJob | None = await call(
            repository.reschedule, tenant_id, job_uuid(job_id), new_ids(now, 1)[0], read_time, now
        )
        if new is None:
            raise no_such_job(job_id)
        self._working.poke_threadsafe()
        return new

    async def replay(self, job_id: str, tenant_id: str | None = None, connection: Any = None) -> Job:
        """A failed job pending again. Raises NotFound, Conflict (JOB_NOT_FAILED, KEY_IN_USE)."""
        await self._opened()
        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        replayed = await call(dead_letters.replay, tenant_id, job_uuid(job_id), self._clock.now())
        if replayed is None:
            raise no_such_job(job_id)
        job = await self.get(job_id, tenant_id, connection)
        if not replayed:
            raise Conflict(
                f"Job {job_id} is {job.state}: only failed jobs are replayed.", code="JOB_NOT_FAILED", existing=job_id,
                fix="Make a new job.",
            )  # fmt: skip
        self._working.poke_threadsafe()
        return job

    async def edited(self, job_id: str, payload: Any, tenant_id: str | None = None, connection: Any = None) -> NewJob:
        """A new job with this payload in place of a failed one. Raises InvalidPayload, NotFound, Conflict
        (JOB_NOT_FAILED, KEY_IN_USE)."""
        await self._opened()
        now = self._clock.now()

        def fit(failed: Job) -> tuple[str, str | None]:
            if (failed.target or {}).get("kind") in OWN_KINDS:
                raise InvalidPayload(
                    f"What a job of {failed.topic} carries is Timebell's own.", code="PAYLOAD_INVALID",
                    fix="Retry it as it is.",
                )  # fmt: skip
            unversioned = {name: text for name, text in failed.metadata.items() if name != VERSION}
            written, metadata = payload_of(failed.topic, payload, unversioned, failed.target, self._accepted)
            return written, encode(metadata, "metadata") if metadata else None

        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        new: NewJob | None = await call(dead_letters.edited, tenant_id, job_uuid(job_id), new_ids(now, 1)[0], fit, now)
        if new is None:
            raise no_such_job(job_id)
        self._working.poke_threadsafe()
        return new

    async def resend(self, job_id: str, tenant_id: str | None = None, connection: Any = None) -> Job:
        """A finished job pending again, to be sent once more. Raises NotFound, Conflict (JOB_NOT_SENT, KEY_IN_USE)."""
        await self._opened()
        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        again = await call(dead_letters.replay, tenant_id, job_uuid(job_id), self._clock.now(), sent=True)
        if again is None:
            raise no_such_job(job_id)
        job = await self.get(job_id, tenant_id, connection)
        if not again:
            where = "" if job.target else ", and went to no target outside Python"
            raise Conflict(
                f"Job {job_id} is {job.state}{where}: there is nothing to send again.", code="JOB_NOT_SENT",
                existing=job_id, fix="Resend what completed or failed at a webhook, command or queue.",
            )  # fmt: skip
        self._working.poke_threadsafe()
        return job

    async def erase(self, owner_id: str, tenant_id: str) -> erasure.Erased:
        """Empty all that is kept under an owner."""
        await self._opened()
        return await self._store.run(erasure.erase, tenant_id, text(owner_id, "owner_id"), self._clock.now())

    async def get(self, job_id: str, tenant_id: str | None = None, connection: Any = None) -> Job:
        """One job, live or finished. Raises NotFound."""
        await self._opened()
        call: Any = self._store.run if connection is None else _joined(self._store, connection)
        job: Job | None = await call(repository.find, tenant_id, job_uuid(job_id))
        if job is None:
            raise no_such_job(job_id)
        return job

    async def list(
        self, equal: Mapping[str, Any], status: str | Sequence[str] | None, limit: int, cursor: str | None,
        min_attempts: int | None = None,
    ) -> Page[Job]:  # fmt: skip
        """A page of jobs, newest first; with `min_attempts`, those that were started so often.

        Raises InvalidInput (STATUS_INVALID, INVALID_LIMIT, INVALID_CURSOR).
        """
        await self._opened()
        after = page.check(limit, cursor)
        words = [status] if isinstance(status, str) else list(status or ())
        states: set[JobState] = set()
        for word in words:
            if word not in STATE_WORDS:
                raise InvalidInput(
                    f"There is no status {word!r}.", code="STATUS_INVALID", fix=f"Use {', '.join(STATE_WORDS)}."
                )
            states |= set(STATE_WORDS[word])
        wanted = {name: value for name, value in equal.items() if value is not None}
        if "schedule_id" in wanted and (id_ := uuid_of(wanted["schedule_id"])) is None:
            return Page([], None)
        if "schedule_id" in wanted:
            wanted["schedule_id"] = id_
        return await self._store.run(repository.page, wanted, states, limit, after, min_attempts or 0)


class _Pattern(NamedTuple):
    """A draft, and what its spec was given but for its time and payload: so much of the next is checked already, if it
    was given the very same objects."""

    spec: JobSpec
    job: NewJob

    @classmethod
    def of(cls, spec: JobSpec, job: NewJob) -> _Pattern | None:
        """None for one that is of a kind of its own: its names, its end and what goes to a target are its own."""
        own = (job.key, job.metadata, job.target, job.named, job.expires_at)
        return None if any(one is not None for one in own) else cls(spec, job)


_alike = " and ".join(f"a.{name} is b.{name}" for name in JobSpec.__slots__ if name not in ("run_at", "payload"))
_like: Callable[[JobSpec, JobSpec], bool] = eval(f"lambda a, b: {_alike}")  # noqa: S307 - a fifth of a loop's cost
"""Whether they were given the very same but for their times and payloads."""


def _joined(store: Store, connection: Any) -> Any:
    async def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        return await store.join(connection, operation, *args, **kwargs)

    return call
