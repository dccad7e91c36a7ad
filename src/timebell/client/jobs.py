"""Client operations on jobs: schedule one or many, cancel, retry, get, list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import repeat
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from timebell import tracing
from timebell.client import datetimes
from timebell.client.job_spec import JobSpec
from timebell.client.validation import (
    PayloadEncoder,
    check_group_name,
    check_priority,
    check_queue_name,
    check_text,
    encode_payload,
    job_not_found,
    merge_labels,
    parse_job_id,
    parse_uuid,
    unknown_options,
)
from timebell.clock import Clock
from timebell.errors import Conflict, InThePast, InvalidInput, InvalidPayload, NotFound
from timebell.feature import Feature
from timebell.ids import new_ids
from timebell.model import page, preconditions
from timebell.model.job import NARROW_STATE_WORDS, STATE_WORDS, Job, JobState, Kind, NewJob, UniformJobs
from timebell.model.page import Page
from timebell.model.payload import encode
from timebell.model.policy import Retry, parse_seconds
from timebell.model.routes import InternalTarget, check_topic, route_for
from timebell.recurrence import zone, zone_key
from timebell.store.dialects.base import Store
from timebell.store.jobs import bind_targets, dead_letters, erasure, next_due, queues, repository
from timebell.store.jobs.search import JobSearch, search_jobs
from timebell.store.schedules import queries
from timebell.targets.handler import JobDefaults
from timebell.targets.payloads import VERSION_KEY, to_json_value

NO_CHANGES: Mapping[str, Any] = {}
InsertSingle = Callable[[NewJob], Awaitable[bool]]
RESCHEDULE_OPTIONS = {
    "payload": ("payload", "metadata"), "metadata": ("metadata", "owner_id"), "owner_id": ("metadata", "owner_id"),
    "correlation_id": ("metadata",), "queue": ("queue",), "priority": ("priority",), "group": ("group",),
    "retry": ("retry",), "timeout": ("timeout",), "expires_after": ("expires_at",), "condition": ("conditions",),
    "unless": ("conditions",),
}  # fmt: skip
"""The changes that `reschedule` accepts, with the columns that each sets."""


def _check_specs(specs: Any) -> list[JobSpec]:
    """Return specs as a list. Raises InvalidInput (INVALID_SPEC)."""
    spec_list = list(specs) if isinstance(specs, Iterable) and not isinstance(specs, str | Mapping) else None
    if spec_list is None or not all(isinstance(spec, JobSpec) for spec in spec_list):
        raise InvalidInput(
            f"schedule_many was called with {specs!r:.60}.", code="INVALID_SPEC",
            fix='Pass a list of JobSpecs: [JobSpec(topic="mail.send", payload={"to": "ana"}), ...].',
        )  # fmt: skip
    return spec_list


def build_search(
    correlation_id: str | None, client_request_id: str | None, metadata: Mapping[str, Any] | None,
    start: datetime | None, end: datetime | None,
) -> JobSearch:  # fmt: skip
    """Return a search from the arguments of `Timebell.list`. Raises InvalidInput (INVALID_RANGE, INVALID_METADATA)."""
    for name, instant in (("start", start), ("end", end)):
        if instant is not None and (not isinstance(instant, datetime) or instant.utcoffset() is None):
            raise InvalidInput(
                f"{name} is {instant!s:.40}, which has no time zone.", code="INVALID_RANGE", fix="Use aware datetimes."
            )
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInput(
            f"metadata is {metadata!r:.60}.", code="INVALID_METADATA", fix='Use values by name: {"order": 7}.'
        )
    pairs = tuple(
        (str(path), value if isinstance(value, str) else encode(value, "metadata"))
        for path, value in (metadata or {}).items()
    )
    return JobSearch(start=start, end=end, request_id=client_request_id, correlation_id=correlation_id, metadata=pairs)


class Jobs:
    """Job operations.

    `ensure_open` opens the store if needed, `check_target` validates targets, `payload_encoder` validates and encodes
    payloads. `job_defaults` returns what handlers define for their new jobs. `has_payload_type` returns whether a
    handler declares the payload type of a topic. `features` erase their own data.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ensure_open: Callable[[], Any],
        check_target: Callable[[Any], dict[str, Any] | None],
        payload_encoder: PayloadEncoder,
        default_timezone: str | None,
        features: Sequence[Feature],
        job_defaults: Callable[[str], JobDefaults],
        has_payload_type: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._check_target = check_target
        self._payload_encoder = payload_encoder
        self._default_timezone = default_timezone
        self._job_defaults, self._has_payload_type = job_defaults, has_payload_type
        self._features = features

    async def create(
        self, specs: Iterable[JobSpec], *, on_conflict: str = "error", connection: Any = None,
        insert_single: InsertSingle | None = None,
    ) -> Sequence[NewJob | str] | UniformJobs:  # fmt: skip
        """Insert jobs, all or none; return each inserted job, or the id of the existing one that replaces it (`keep`).

        `insert_single` inserts a single job in another way, or returns False. Raises InvalidInput before anything is
        written; Conflict.
        """
        if on_conflict not in ("error", "keep", "replace"):
            raise InvalidInput(
                f"on_conflict is {on_conflict!r}.", code="INVALID_ON_CONFLICT", fix="Use error, keep or replace."
            )
        specs = _check_specs(specs)
        await self._ensure_open()
        now = self._clock.now()
        if not specs:
            return []
        ids = new_ids(now, len(specs))
        with tracing.creation_span((str(spec.topic) for spec in specs), ids):
            return await self._create(specs, ids, now, on_conflict, connection, insert_single)

    async def _create(
        self, specs: list[JobSpec], ids: list[str], now: datetime, on_conflict: str, connection: Any,
        insert_single: InsertSingle | None,
    ) -> Sequence[NewJob | str] | UniformJobs:  # fmt: skip
        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        if connection is None and (uniform := self._draft_uniform(specs, ids, now)) is not None:
            await call(repository.create, uniform, on_conflict)
            return uniform
        new: list[NewJob] = []
        repeated: dict[str, str] = {}
        template: _DraftTemplate | None = None
        for spec, id_ in zip(specs, ids, strict=True):
            try:
                job = None if template is None else self._draft_from_template(template, spec, id_, now)
                if job is None:
                    job = self.draft(spec, id_, now)
                    template = _DraftTemplate.from_job(spec, job)
                new.append(job)
            except InThePast:  # accepted if it repeats a request that was made in time
                if (existing_id := await self._find_repeated_request(spec, on_conflict, call)) is None:
                    raise
                repeated[id_] = existing_id
        if insert_single is not None and len(new) == 1 and await insert_single(new[0]):
            return [*new]
        existing: dict[str, str] = {}
        if new:
            existing = await call(repository.create, new, on_conflict, bulk=connection is None and len(new) > 1)
        if not existing and not repeated:
            return [*new]
        created: dict[str, NewJob | str] = {job.id: existing.get(job.id, job) for job in new}
        created |= repeated
        return [created[id_] for id_ in ids]

    async def _find_repeated_request(self, spec: JobSpec, on_conflict: str, call: Any) -> str | None:
        """Return the id of the job already created with the spec's request id, if there is one. Raises Conflict."""
        labels = merge_labels(spec.metadata, {"client_request_id": spec.client_request_id})
        if (request_id := labels.get("client_request_id")) is None:
            return None
        tenant_id = "default" if spec.tenant_id is None else check_text(spec.tenant_id, "tenant_id")
        job_id: str | None = await call(repository.find_by_request_id, tenant_id, request_id, on_conflict)
        return job_id

    def draft(self, spec: JobSpec, id_: str, now: datetime, default_timezone: str | None = None) -> NewJob:
        """Validate a spec and return the row to insert. Raises InvalidInput, Refused."""
        default = default_timezone or self._default_timezone
        resolved = datetimes.resolve_run_at(spec.run_at, spec.timezone, default, now, spec.on_gap, spec.on_fold)
        target = self._check_target(spec.target)
        target_name = None if target is None else target.get("name")
        labels = {
            "owner_id": spec.owner_id, "correlation_id": spec.correlation_id,
            "client_request_id": spec.client_request_id,
        }  # fmt: skip
        metadata = tracing.current_context() | merge_labels(spec.metadata, labels)
        retry = Retry.parse(spec.retry)
        topic = check_topic(spec.topic)
        defaults = self._job_defaults(topic) if target is None else JobDefaults()
        expires_after = defaults.expires_after
        if spec.expires_after is not None:
            expires_after = parse_seconds(spec.expires_after, "expires_after")
        payload, metadata = encode_payload(topic, spec.payload, metadata, target, self._payload_encoder, self._features)
        tenant_id = "default" if spec.tenant_id is None else check_text(spec.tenant_id, "tenant_id")
        return NewJob(
            id=id_, tenant_id=tenant_id, topic=topic,
            scheduled_at=resolved.at, created_at=now, **resolved.fields(),
            payload=payload, metadata=encode(metadata, "metadata") if metadata else None,
            owner_id=metadata.get("owner_id"), key=None if spec.key is None else check_text(spec.key, "key"),
            request_id=metadata.get("client_request_id"), kind=Kind.ONCE,
            target=encode(target, "target") if target else None, target_name=target_name,
            route=route_for(topic, target) if target_name is None else "",
            queue=defaults.queue if spec.queue is None else check_queue_name(spec.queue),
            priority=defaults.priority if spec.priority is None else check_priority(spec.priority),
            group=check_group_name(spec.group), conditions=preconditions.serialize(spec.condition, spec.unless),
            retry=encode(retry.to_json()) if retry else None,
            timeout=None if spec.timeout is None else parse_seconds(spec.timeout, "timeout", minimum=0.001),
            expires_at=None if expires_after is None else resolved.at + timedelta(seconds=expires_after),
        )  # fmt: skip

    def _draft_from_template(self, template: _DraftTemplate, spec: JobSpec, id_: str, now: datetime) -> NewJob | None:
        """Draft a spec that differs from the template only in time and payload; None if it differs in more."""
        if not _same_fields(spec, template.spec):
            return None
        base = template.job
        resolved = datetimes.resolve_run_at(
            spec.run_at, spec.timezone, self._default_timezone, now, spec.on_gap, spec.on_fold
        )
        payload, metadata = self._payload_encoder(base.topic, spec.payload, {})
        if metadata:
            return None
        return NewJob(
            id=id_, tenant_id=base.tenant_id, topic=base.topic, scheduled_at=resolved.at, created_at=now,
            **resolved.fields(), payload=payload, route=base.route, queue=base.queue, priority=base.priority,
            group=base.group, conditions=base.conditions, retry=base.retry, timeout=base.timeout,
        )  # fmt: skip

    def _draft_uniform(self, specs: list[JobSpec], ids: list[str], now: datetime) -> UniformJobs | None:
        """Draft valid specs that differ only in time and payload in one pass; None if they need individual drafts."""
        first = specs[0]
        if len(specs) == 1 or not all(map(_same_fields, specs, repeat(first))):
            return None
        times = datetimes.resolve_uniform([spec.run_at for spec in specs], now)
        if times is None:
            return None
        base = self.draft(first, ids[0], now)
        if _DraftTemplate.from_job(first, base) is None or self._has_payload_type(base.topic):
            return None
        return UniformJobs(base, ids, times, [encode(to_json_value(spec.payload)) for spec in specs])

    async def find_unknown_targets(self, new: Sequence[NewJob]) -> set[str]:
        """Return the ids of drafts with an unknown named target."""
        if not any(job.target_name for job in new):
            return set()
        await self._ensure_open()
        return await self._store.run(bind_targets.find_unbound, new)

    async def insert_drafts(self, new: Sequence[NewJob]) -> int:
        """Insert drafts that each have a client request id; return how many existed already."""
        await self._ensure_open()
        return len(await self._store.run(repository.create, new, "keep")) if new else 0

    async def cancel(
        self, job_id: str, tenant_id: str | None = None, connection: Any = None, *, stop: bool = False
    ) -> repository.CancelResult:
        """Cancel a job: prevent its start if possible, otherwise further attempts. Raises NotFound.

        With `stop`, a running handler is stopped.
        """
        await self._ensure_open()
        id_ = parse_job_id(job_id)
        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        result = await call(repository.cancel, tenant_id, id_, self._clock.now(), stop=stop)
        if result is None:
            raise await self._missing(job_id, tenant_id, call)
        return result  # type: ignore[no-any-return]

    async def cancel_matching(self, filters: Mapping[str, Any], tenant_id: str) -> repository.BulkCancelResult:
        """Cancel all live jobs with these values, 1,000 per transaction. Raises InvalidInput (FILTER_MISSING)."""
        await self._ensure_open()
        criteria = {name: value for name, value in filters.items() if value is not None}
        if not criteria:
            raise InvalidInput(
                "No filter was specified.", code="FILTER_MISSING",
                fix="Specify at least one of key, owner_id, topic, schedule_id, queue.",
            )  # fmt: skip
        if "schedule_id" in criteria and (id_ := parse_uuid(criteria["schedule_id"])) is None:
            return repository.BulkCancelResult()
        if "schedule_id" in criteria:
            criteria["schedule_id"] = id_
        prevented = in_flight = 0
        after: str | None = None
        while True:
            where = criteria | {"tenant_id": tenant_id}
            batch, after = await self._store.run(repository.cancel_matching, where, self._clock.now(), after, 1000)
            prevented, in_flight = prevented + batch.prevented, in_flight + batch.in_flight
            if after is None:
                return repository.BulkCancelResult(prevented, in_flight)

    async def reschedule(
        self, job_id: str, run_at: datetime | str | None, timezone: str | ZoneInfo | None, tenant_id: str | None,
        connection: Any = None, changes: Mapping[str, Any] = NO_CHANGES,
    ) -> NewJob:  # fmt: skip
        """Replace a pending job by a new one with another time or other fields.

        Raises InvalidInput, NotFound, Conflict.
        """
        if unknown := [name for name in changes if name not in RESCHEDULE_OPTIONS]:
            raise unknown_options("reschedule", unknown, RESCHEDULE_OPTIONS)
        await self._ensure_open()
        now = self._clock.now()

        def change_fields(old: Job) -> dict[str, Any]:
            if run_at is None and changes:
                times: dict[str, Any] = {"run_at": old.run_at, "timezone": old.timezone, "local_time": old.local_time}
                if timezone is not None and (name := zone(zone_key(timezone)).name) != old.timezone:
                    times |= {"timezone": name, "local_time": None, "tzdata": None}  # the instant stays
            else:
                is_kept = timezone is None and datetimes.is_utc(run_at)
                times = datetimes.resolve_run_at(
                    run_at, old.timezone if is_kept else timezone, old.timezone, now
                ).fields()
            return self._changed_columns(old, changes, times["run_at"], now) | times if changes else times

        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        new: NewJob | None = await call(
            repository.reschedule, tenant_id, parse_job_id(job_id), new_ids(now, 1)[0], change_fields, now
        )
        if new is None:
            raise await self._missing(job_id, tenant_id, call)
        return new

    def _changed_columns(self, old: Job, changes: Mapping[str, Any], run_at: datetime, now: datetime) -> dict[str, Any]:
        """Return the columns that `changes` set, from a validated draft. Raises InvalidInput."""
        metadata = {**(changes.get("metadata", old.metadata) or {})}
        if "payload" not in changes and (VERSION_KEY in old.metadata or self._has_payload_type(old.topic)):
            metadata.setdefault(VERSION_KEY, old.metadata.get(VERSION_KEY, 1))
        elif "metadata" not in changes:
            metadata.pop(VERSION_KEY, None)
        metadata |= {name: changes[name] for name in ("owner_id", "correlation_id") if name in changes}
        own = {name: value for name, value in changes.items() if name not in ("owner_id", "correlation_id")}
        spec = JobSpec(**{
            "topic": old.topic, "run_at": max(run_at, now), "timezone": "UTC", "tenant_id": old.tenant_id,
            "payload": old.payload, "target": old.target and InternalTarget(old.target),  # in its stored form
            **own, "metadata": {name: value for name, value in metadata.items() if value is not None},
        })  # fmt: skip
        draft = self.draft(spec, old.id, now)
        columns = {column for name in changes for column in RESCHEDULE_OPTIONS[name]}
        changed = {column: getattr(draft, column) for column in columns}
        if "expires_after" in changes and draft.expires_at is not None:
            changed["expires_at"] = run_at + timedelta(seconds=parse_seconds(changes["expires_after"], "expires_after"))
        return changed

    async def retry(
        self, job_id: str, tenant_id: str | None = None, connection: Any = None, actor: str | None = None
    ) -> Job:
        """Make a failed job pending again, with a fresh budget. Its attempts show `actor` as the origin of the retry.

        Raises NotFound, Conflict (JOB_NOT_FAILED, KEY_IN_USE).
        """
        await self._ensure_open()
        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        retried = await call(dead_letters.retry, tenant_id, parse_job_id(job_id), self._clock.now(), actor)
        if retried is None:
            raise await self._missing(job_id, tenant_id, call)
        job = await self.get(job_id, tenant_id, connection)
        if not retried:
            raise Conflict(
                f"Job {job_id} is {job.state}: only failed jobs can be retried.", code="JOB_NOT_FAILED",
                existing=job_id, fix="Create a new job.",
            )  # fmt: skip
        return job

    async def retry_with_payload(
        self, job_id: str, payload: Any, tenant_id: str | None = None, connection: Any = None
    ) -> NewJob:
        """Replace a failed job by a new one with another payload.

        Raises InvalidPayload, NotFound, Conflict (JOB_NOT_FAILED, KEY_IN_USE).
        """
        await self._ensure_open()
        now = self._clock.now()
        internal_kinds = {"alert", *(kind for feature in self._features for kind in feature.internal_target_kinds)}

        def encode_for(failed: Job) -> tuple[str, str | None]:
            if (failed.target or {}).get("kind") in internal_kinds:
                raise InvalidPayload(
                    f"The payload of a job of {failed.topic} is internal to Timebell.", code="INVALID_PAYLOAD",
                    fix="Retry the job without another payload.",
                )  # fmt: skip
            unversioned = {name: text for name, text in failed.metadata.items() if name != VERSION_KEY}
            encoded, metadata = encode_payload(
                failed.topic, payload, unversioned, failed.target, self._payload_encoder, self._features
            )
            return encoded, encode(metadata, "metadata") if metadata else None

        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        new: NewJob | None = await call(
            dead_letters.retry_with_payload, tenant_id, parse_job_id(job_id), new_ids(now, 1)[0], encode_for, now
        )
        if new is None:
            raise await self._missing(job_id, tenant_id, call)
        return new

    async def redeliver(
        self, job_id: str, tenant_id: str | None = None, connection: Any = None, actor: str | None = None
    ) -> Job:
        """Make a finished job pending again, to deliver it to its target once more; `actor` as in `retry`.

        Raises NotFound, Conflict (JOB_NOT_SENT, KEY_IN_USE).
        """
        await self._ensure_open()
        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        redelivered = await call(
            dead_letters.retry, tenant_id, parse_job_id(job_id), self._clock.now(), actor, redeliver=True
        )
        if redelivered is None:
            raise await self._missing(job_id, tenant_id, call)
        job = await self.get(job_id, tenant_id, connection)
        if not redelivered:
            suffix = "" if job.target else " and has no target outside Python"
            raise Conflict(
                f"Job {job_id} is {job.state}{suffix}: it cannot be redelivered.", code="JOB_NOT_SENT",
                existing=job_id, fix="Redeliver jobs that completed or failed at a webhook, command or queue.",
            )  # fmt: skip
        return job

    async def erase(self, owner_id: str, tenant_id: str) -> erasure.ErasureResult:
        """Erase the data of all jobs of an owner (GDPR)."""
        await self._ensure_open()
        owner_id = check_text(owner_id, "owner_id")
        return await self._store.run(erasure.erase, tenant_id, owner_id, self._clock.now(), self._features)

    async def get(self, job_id: str, tenant_id: str | None = None, connection: Any = None) -> Job:
        """Return a job, live or finished. Raises NotFound."""
        await self._ensure_open()
        call: Any = self._store.run if connection is None else _run_in_transaction(self._store, connection)
        job: Job | None = await call(repository.find_job, tenant_id, parse_job_id(job_id))
        if job is None:
            raise await self._missing(job_id, tenant_id, call)
        return job

    async def _missing(self, job_id: str, tenant_id: str | None, call: Any) -> NotFound:
        """Return the error for an id that is not that of a job."""
        schedule = await call(queries.find_schedule, tenant_id or "default", id_=parse_job_id(job_id))
        if schedule is None:
            return job_not_found(job_id)
        return NotFound(
            f"{job_id} is the schedule {schedule.name!r}, not a job.", code="JOB_NOT_FOUND",
            fix="Use the methods of app.schedules, or list its jobs: app.list(schedule_id=...).",
        )  # fmt: skip

    async def list(
        self, filters: Mapping[str, Any], status: str | Sequence[str] | None, limit: int, cursor: str | None,
        min_attempts: int | None = None, search: JobSearch | None = None,
    ) -> Page[Job]:  # fmt: skip
        """Return a page of jobs, newest first; with `min_attempts`, those with at least as many attempts.

        With `search`, a page may be short and have a next one: it examines a limited number of jobs.

        Raises InvalidInput (INVALID_STATUS, INVALID_LIMIT, INVALID_CURSOR).
        """
        await self._ensure_open()
        after = page.validate_paging(limit, cursor)
        words = [status] if isinstance(status, str) else list(status or ())
        states: set[JobState] = set()
        for word in words:
            if word not in STATE_WORDS:
                raise InvalidInput(
                    f"There is no status {word!r}.", code="INVALID_STATUS", fix=f"Use {', '.join(STATE_WORDS)}."
                )
            states |= set(STATE_WORDS[word])
        if len(set(words)) > 1 and not set(words).isdisjoint(NARROW_STATE_WORDS):
            raise InvalidInput(
                "The statuses 'retrying' and 'held' cannot be combined with others.", code="INVALID_STATUS",
                fix="List them separately.",
            )  # fmt: skip
        if "retrying" in words:
            min_attempts = max(min_attempts or 0, 1)
        if "held" in words:
            search = replace(search or JobSearch(), is_held=True)
        criteria = {name: value for name, value in filters.items() if value is not None}
        if "schedule_id" in criteria and (id_ := parse_uuid(criteria["schedule_id"])) is None:
            return Page([], None)
        if "schedule_id" in criteria:
            criteria["schedule_id"] = id_
        if search:
            return await self._store.run(search_jobs, criteria, states, search, limit, after, min_attempts or 0)
        return await self._store.run(repository.list_jobs, criteria, states, limit, after, min_attempts or 0)

    async def list_next_due(
        self, tenant_id: str, queue: str | None, limit: int, cursor: str | None
    ) -> Page[Job]:  # fmt: skip
        """Return a page of the pending jobs that are not held, all or those of a queue, earliest due time first.

        Raises InvalidInput (INVALID_LIMIT, INVALID_CURSOR).
        """
        await self._ensure_open()
        page.validate_paging(limit, None)
        return await self._store.run(next_due.list_next_due, tenant_id, queue, limit, cursor)

    async def pause_queue(self, name: str | None, reason: str | None) -> None:
        """Stop claiming jobs of a queue; None: stop all claiming and planning. Raises InvalidInput (INVALID_QUEUE)."""
        await self._ensure_open()
        await self._store.run(queues.pause, queues.ALL_QUEUES if name is None else check_queue_name(name), reason)

    async def resume_queue(self, name: str | None) -> None:
        """Undo `pause_queue`. Raises InvalidInput (INVALID_QUEUE)."""
        await self._ensure_open()
        await self._store.run(queues.resume, queues.ALL_QUEUES if name is None else check_queue_name(name))


class _DraftTemplate(NamedTuple):
    """A validated draft and its spec.

    A further spec whose fields are identical objects, except for time and payload, needs no validation of them.
    """

    spec: JobSpec
    job: NewJob

    @classmethod
    def from_job(cls, spec: JobSpec, job: NewJob) -> _DraftTemplate | None:
        """Return a template; None if the job has fields that are specific to it: key, metadata, target, expiry."""
        specific = (job.key, job.metadata, job.target, job.target_name, job.expires_at)
        return None if any(value is not None for value in specific) else cls(spec, job)


_same_fields_expression = " and ".join(
    f"a.{name} is b.{name}" for name in JobSpec.__slots__ if name not in ("run_at", "payload")
)
_same_fields: Callable[[JobSpec, JobSpec], bool] = eval(f"lambda a, b: {_same_fields_expression}")  # noqa: S307 - a fifth of a loop's cost
"""Return whether two specs have identical objects in all fields except time and payload."""


def _run_in_transaction(store: Store, connection: Any) -> Any:
    async def call(operation: Any, *args: Any, **kwargs: Any) -> Any:
        return await store.join(connection, operation, *args, **kwargs)

    return call
