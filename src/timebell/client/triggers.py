"""The verbs for triggers and their sources: make, change, pause, scan; and what a source says of its items."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

from timebell.alarm import Alarm
from timebell.client.jobs import Jobs, JobSpec
from timebell.client.secrets import named as plain_name
from timebell.client.validation import text, unknown_options, uuid_of
from timebell.clock import Clock
from timebell.errors import InvalidInput, NotFound
from timebell.ids import new_id
from timebell.model import condition as conditions
from timebell.model import page
from timebell.model.audience_source import has_password
from timebell.model.connection import connection_of
from timebell.model.operation import Operation
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry, seconds
from timebell.model.schedule import Action
from timebell.model.target import secret_of
from timebell.model.trigger import (
    GRACE,
    Change,
    Item,
    Observed,
    Place,
    Rule,
    Source,
    Trigger,
    offsets_of,
    version_of,
)
from timebell.recurrence import zone
from timebell.store.cluster import operations
from timebell.store.dialects.base import Store
from timebell.store.triggers import planned_firings, sources, triggers
from timebell.store.triggers.planned_firings import payload_of
from timebell.store.triggers.sources import no_such_source, no_such_trigger
from timebell.triggers import adapter

R = TypeVar("R")
KINDS = ("webhook", "sql", "monday")
BATCH = 500
LONGEST_GRACE = 30 * 86_400.0
OPTIONS = (
    *("payload", "metadata", "owner_id", "target", "queue", "priority", "group", "retry", "timeout", "expires_after"),
    *("offsets", "timezone", "recipients", "condition", "unless", "grace"),
)


class Triggers:
    """The verbs. `opened` makes sure that the store is open; `jobs` checks what is to be done when one fires."""

    def __init__(
        self, store: Store, clock: Clock, working: Alarm, opened: Callable[[], Any], jobs: Jobs,
        operate: Callable[[], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._working = working
        self._opened = opened
        self._jobs = jobs
        self._operate = operate

    async def put_source(
        self, name: str, kind: str = "webhook", options: Mapping[str, Any] | None = None, *, replace: bool = True,
        tenant_id: str = "default", created_by: str | None = None, connection: Any = None,
    ) -> Source:  # fmt: skip
        """Make a source, or give the one there is other options, unless `replace=False`.

        Raises InvalidInput (INVALID_NAME, SOURCE_UNKNOWN, SOURCE_OPTIONS_INVALID), Conflict (SOURCE_EXISTS,
        SOURCE_KIND_FIXED).
        """
        if kind not in KINDS:
            raise InvalidInput(
                f"There is no source {kind!r:.60}.", code="SOURCE_UNKNOWN", fix=f"The kinds are {', '.join(KINDS)}."
            )
        _check_options(kind, options or {})
        now = self._clock.now()
        wanted = Source(
            id=new_id(now), tenant_id=text(tenant_id, "tenant_id"), name=plain_name(name), kind=kind,
            options=dict(options or {}), created_at=now, created_by=created_by, updated_at=now,
        )  # fmt: skip
        made = await self._run(connection, sources.put, wanted, now, replace=replace)
        if connection is None:
            self._operate()
        return made

    async def source(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Source:
        """One source. Raises NotFound (SOURCE_NOT_FOUND)."""
        found = await self._run(connection, sources.find, tenant_id, name)
        if found is None:
            raise no_such_source(name)
        return found

    async def sources(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Source]:  # fmt: skip
        """A page of sources by name. Raises InvalidInput."""
        page.check(limit, None)
        return await self._run(None, sources.page, tenant_id, limit, cursor)

    async def delete_source(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Source:
        """Forget a source and its items. Raises NotFound, and Conflict (SOURCE_IN_USE) while it has triggers."""
        found = await self._run(connection, sources.remove, tenant_id, name)
        if found is None:
            raise no_such_source(name)
        return found

    async def put_items(
        self, source: str, changes: Iterable[Mapping[str, Any]], *, tenant_id: str = "default", connection: Any = None
    ) -> Observed:  # fmt: skip
        """Say of items of a source what they are now: `{"key": "42", "version": 7, "fields": {...}}`, or that one is
        gone: `{"key": "42", "version": 8, "deleted": True}`.

        Jobs follow in the same transaction, 500 items at a time. A change that is not newer than what is known is
        counted as `stale`; one without a version is always newer. Raises InvalidInput (INVALID_ITEM, INVALID_VERSION),
        NotFound (SOURCE_NOT_FOUND).
        """
        read = [_change(one) for one in changes]
        home = await self.source(source, tenant_id=tenant_id, connection=connection)
        total = Observed()
        for start in range(0, len(read), BATCH):
            batch = read[start : start + BATCH]
            total.add(await self._run(connection, planned_firings.observe, home, batch, self._clock.now()))
        if total.made:
            self._working.poke_threadsafe()
        return total

    async def items(
        self, source: str, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Item]:  # fmt: skip
        """A page of a source's items by key, as they were last heard of. Raises InvalidInput, NotFound."""
        page.check(limit, None)
        home = await self.source(source, tenant_id=tenant_id)
        return await self._run(None, sources.page_of_items, home.id, limit, cursor)

    async def put(
        self, /, name: str, source: str, column: str, topic: str, *, replace: bool = True, tenant_id: str = "default",
        created_by: str | None = None, connection: Any = None, **options: Any,
    ) -> tuple[Trigger, Operation | None]:  # fmt: skip
        """Make a trigger, or change the one there is, unless `replace=False`: a job of `topic` at each of `offsets`
        (`["0"]`) from the instant in `column` of each item; and the operation that plans for the items there are.

        Options: offsets, timezone (of values without an offset from UTC), recipients (a column: one job a person),
        condition (comparisons of fields that have to hold at that time), unless (a query to a source of kind sql: what
        it finds speaks against firing; :item, :recipient, :offset and the item's fields are parameters), grace
        (seconds, 300: so late an instant still fires when it is learnt of), and of the job payload, metadata,
        owner_id, target, queue, priority, group,
        retry, timeout, expires_after. The same again is no edit, and there is no operation. Raises InvalidInput
        (INVALID_OFFSET, INVALID_CONDITION, ...), NotFound (SOURCE_NOT_FOUND, TARGET_NOT_FOUND), Conflict
        (TRIGGER_EXISTS, TRIGGER_SOURCE_FIXED).
        """
        if unknown := [option for option in options if option not in OPTIONS]:
            raise unknown_options("triggers.put", unknown, OPTIONS)
        now = self._clock.now()
        wanted = self._draft(name, source, column, topic, options, tenant_id, created_by, now)
        await self._opened()

        made = await self._run(connection, triggers.put, wanted, now, replace=replace)
        if made[1] is not None and connection is None:
            self._operate()
        return made

    def _draft(
        self, name: str, source: str, column: str, topic: str, options: Mapping[str, Any], tenant_id: str,
        created_by: str | None, now: datetime,
    ) -> Trigger:  # fmt: skip
        timezone, recipients = options.get("timezone"), options.get("recipients")
        if timezone is not None:
            zone(timezone)
        grace = seconds(options.get("grace", GRACE), "grace")
        rule = Rule(
            column=text(column, "column"), offsets=offsets_of(options.get("offsets", ["0"])), timezone=timezone,
            recipients=None if recipients is None else text(recipients, "recipients"),
            condition=conditions.read(options.get("condition")), grace=min(grace, LONGEST_GRACE),
            unless=conditions.query(options.get("unless")),
        )  # fmt: skip
        encode(sources.rule_json(rule), "condition")
        retry, timeout, expires = (options.get(name) for name in ("retry", "timeout", "expires_after"))
        action = Action(
            topic=topic, payload=options.get("payload"), metadata=dict(options.get("metadata") or {}),
            owner_id=options.get("owner_id"), target=options.get("target"), queue=options.get("queue", "default"),
            priority=options.get("priority", 0), group=options.get("group"), retry=Retry.read(retry),
            timeout=None if timeout is None else seconds(timeout, "timeout", least=0.001),
            expires_after=None if expires is None else seconds(expires, "expires_after"),
        )  # fmt: skip
        drafted = Trigger(
            id=new_id(now), tenant_id=text(tenant_id, "tenant_id"), name=plain_name(name), source_id="",
            source=plain_name(source), rule=rule, action=action, created_at=now, created_by=created_by, updated_at=now,
        )  # fmt: skip
        # Checked as a job of it would be.
        sample = JobSpec(
            topic=topic, timezone="UTC", payload=payload_of(drafted, "item", Place("0", "someone"), now),
            owner_id=action.owner_id, metadata=action.metadata or None, retry=action.retry, timeout=action.timeout,
            queue=action.queue, priority=action.priority, group=action.group, target=action.target,
            run_at=now + timedelta(seconds=1),
        )  # fmt: skip
        checked = self._jobs.draft(sample, drafted.id, now)
        target = {"name": checked.named} if checked.named is not None else decode(checked.target)
        kept = dataclasses.replace(action, target=target, metadata=decode(checked.metadata) or {})
        return dataclasses.replace(drafted, action=kept)

    async def get(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Trigger:
        """One trigger. Raises NotFound (TRIGGER_NOT_FOUND)."""
        return await self._one(connection, name, sources.trigger, tenant_id, name)

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Trigger]:  # fmt: skip
        """A page of triggers by name. Raises InvalidInput."""
        page.check(limit, None)
        return await self._run(None, sources.page_of_triggers, tenant_id, limit, cursor)

    async def pause(
        self, name: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Trigger:  # fmt: skip
        """Fire nothing until it is resumed: what becomes due meanwhile is `skipped (paused)`. Raises NotFound."""
        return await self._one(connection, name, triggers.enable, tenant_id, name, reason, self._clock.now(), on=False)

    async def resume(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Trigger:
        """Fire again. Raises NotFound."""
        return await self._one(connection, name, triggers.enable, tenant_id, name, None, self._clock.now(), on=True)

    async def scan(
        self, name: str, *, tenant_id: str = "default", created_by: str | None = None, connection: Any = None
    ) -> Operation:  # fmt: skip
        """Go through every item once more, and plan what is missing. Raises NotFound."""
        found = await self.get(name, tenant_id=tenant_id, connection=connection)
        begun = await self._run(connection, triggers.scan, found, self._clock.now(), created_by)
        if connection is None:
            self._operate()
        return begun

    async def progress(self, operation_id: str, *, tenant_id: str = "default") -> Operation:
        """How far a scan, or another operation, has come. Raises NotFound (OPERATION_NOT_FOUND)."""
        id_ = uuid_of(operation_id)
        found = None if id_ is None else await self._run(None, operations.find, tenant_id, id_)
        if found is None:
            raise NotFound(f"There is no operation {operation_id!s:.60}.", code="OPERATION_NOT_FOUND")
        return found

    async def delete(
        self, name: str, *, tenant_id: str = "default", created_by: str | None = None, connection: Any = None
    ) -> Operation:  # fmt: skip
        """Forget a trigger: from now on nothing of it is delivered, and the operation cancels its jobs.

        Raises NotFound.
        """
        now = self._clock.now()
        _, begun = await self._one(connection, name, triggers.remove, tenant_id, name, now, created_by)
        if connection is None:
            self._operate()
        return begun

    async def _one(
        self, connection: Any, name: str, operation: Callable[..., R | None], *args: Any, **kwargs: Any
    ) -> R:
        found = await self._run(connection, operation, *args, **kwargs)
        if found is None:
            raise no_such_trigger(name)
        return found

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        await self._opened()
        if connection is None:
            return await self._store.run(operation, *args, **kwargs)
        return await self._store.join(connection, operation, *args, **kwargs)


def _check_options(kind: str, options: Any) -> None:
    """Raises InvalidInput (SOURCE_OPTIONS_INVALID)."""
    if not isinstance(options, Mapping) or (kind == "webhook" and options):
        raise InvalidInput(
            f"A source of kind {kind} has no such options.", code="SOURCE_OPTIONS_INVALID",
            fix="A webhook has none; the others take a mapping.",
        )  # fmt: skip
    encode(dict(options), "options")
    if kind != "webhook":
        hidden = {"url": "postgresql://host/name", "token": "token", "signingSecret": "secret"}
        stands = {name for name, value in options.items() if secret_of(value) is not None}
        stands |= {name for name, value in options.items() if name == "token" and connection_of(value) is not None}
        adapter(kind, {name: hidden.get(name, value) if name in stands else value for name, value in options.items()})
        if "url" not in stands and has_password(str(options.get("url", ""))):
            raise InvalidInput(
                "The url has a password in it, which everybody who reads the source would see.",
                code="SOURCE_OPTIONS_INVALID", fix='Put the url into a secret, and give {"secret": "its name"}.',
            )  # fmt: skip


def _change(given: Any) -> Change:
    """A change as it is written. Raises InvalidInput (INVALID_ITEM, INVALID_KEY, INVALID_VERSION, PAYLOAD_...)."""
    if not isinstance(given, Mapping) or not given.keys() <= {"key", "version", "fields", "deleted"}:
        raise _invalid_item(given)
    key, version, fields, gone = (given.get(name) for name in ("key", "version", "fields", "deleted"))
    key = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
    if gone not in (None, True, False) or bool(gone) == isinstance(fields, Mapping) or (gone and fields is not None):
        raise _invalid_item(given)
    read = None if gone else dict(fields)  # type: ignore[arg-type]
    encode(read, "fields")
    return Change(text(key, "key"), None if version is None else version_of(version), read)


def _invalid_item(given: Any) -> InvalidInput:
    return InvalidInput(
        f"{given!r:.80} is no change of an item.", code="INVALID_ITEM",
        fix='Give {"key": ..., "version": ..., "fields": {...}}, or {"key": ..., "version": ..., "deleted": true}.',
    )  # fmt: skip
