"""Client operations on triggers, their sources, and the items of sources."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar, Unpack

from timebell.client.job_spec import JobSpec
from timebell.client.jobs import Jobs
from timebell.client.secrets import check_name
from timebell.client.validation import check_text, parse_uuid, unknown_options
from timebell.clock import Clock
from timebell.errors import InvalidInput, NotFound
from timebell.features.triggers.client.options import TriggerOptions
from timebell.features.triggers.client.source_check import SourceCheck, check_column
from timebell.features.triggers.model.connection import connection_name
from timebell.features.triggers.model.item_history import FiringRecord, ItemHistory, explain_item
from timebell.features.triggers.model.trigger import (
    DEFAULT_GRACE_SECONDS,
    ChangeSummary,
    FiringKey,
    Item,
    ItemChange,
    Source,
    Trigger,
    TriggerRule,
    parse_edge,
    parse_offsets,
    parse_version,
)
from timebell.features.triggers.sources import POLLED_KINDS, create_adapter, scan_interval
from timebell.features.triggers.sources.call_plan import account_id
from timebell.features.triggers.store import item_changes, item_history, sources, triggers
from timebell.features.triggers.store.firing_audit import FiringAudit, audit_page
from timebell.features.triggers.store.planned_firings import build_payload
from timebell.features.triggers.store.sources import grace_too_short, no_such_trigger
from timebell.ids import new_id
from timebell.model import condition as conditions
from timebell.model import page
from timebell.model.job import Job
from timebell.model.operation import Operation
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry, parse_seconds
from timebell.model.schedule import Action
from timebell.model.target import has_password, referenced_secret
from timebell.recurrence import zone, zone_key
from timebell.recurrence.instants import from_us, to_us
from timebell.store.cluster import operations
from timebell.store.dialects.base import Store
from timebell.store.jobs.query_sources import no_such_source
from timebell.store.jobs.repository import find_job
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
SOURCE_KINDS = ("webhook", "sql", "monday")
ITEM_BATCH_SIZE = 500
AUDIT_DELAY = timedelta(seconds=60)
"""Instants of the last minute are not audited: their jobs may be running."""
MAX_GRACE_SECONDS = 30 * 86_400.0


class Triggers:
    """Trigger operations.

    `ensure_open` opens the store if needed, `jobs` validates the job that a trigger creates, `get_keyring` provides the
    keys for the secrets with which the database of a source is checked.
    """

    def __init__(
        self, store: Store, clock: Clock, ensure_open: Callable[[], Any], jobs: Jobs,
        get_keyring: Callable[[], Keyring],
    ) -> None:  # fmt: skip
        self._check = SourceCheck(store, get_keyring)
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._jobs = jobs

    async def put_source(
        self, name: str, kind: str = "webhook", options: Mapping[str, Any] | None = None, *, replace: bool = True,
        tenant_id: str = "default", created_by: str | None = None, connection: Any = None,
    ) -> Source:  # fmt: skip
        """Create a source, or change the options of an existing one, unless `replace=False`.

        Without a `connection`, the options are checked as by `check_source`. Raises InvalidInput (INVALID_NAME,
        UNKNOWN_SOURCE_KIND, INVALID_SOURCE_OPTIONS), Conflict (SOURCE_EXISTS, SOURCE_KIND_FIXED).
        """
        draft = self.draft_source(name, kind, options, tenant_id=tenant_id, created_by=created_by)
        if connection is None:
            await self.check_source(draft)
        source = await self._run(
            connection, sources.upsert_source, draft, draft.created_at, replace=replace,
            intervals=await self._scan_intervals(connection, draft),
        )  # fmt: skip
        return source

    async def _scan_intervals(self, connection: Any, source: Source) -> dict[str, float]:
        """Return the seconds between full scans, by name, of a source and of those whose daily calls it shares."""
        sharing = [source]
        if source.kind == "monday":
            account = account_id(source.tenant_id, source.options)
            boards = await self._run(connection, sources.list_sources_of_kinds, ("monday",), source.tenant_id)
            sharing += [
                each for each in boards
                if each.name != source.name and account_id(each.tenant_id, each.options) == account
            ]  # fmt: skip
        return {each.name: scan_interval(each.kind, each.options, len(sharing)) for each in sharing}

    def draft_source(
        self, name: str, kind: str = "webhook", options: Mapping[str, Any] | None = None, *,
        tenant_id: str = "default", created_by: str | None = None,
    ) -> Source:  # fmt: skip
        """Check a source, and return it without storing it. Raises InvalidInput."""
        if kind not in SOURCE_KINDS:
            raise InvalidInput(
                f"There is no source kind {kind!r:.60}.",
                code="UNKNOWN_SOURCE_KIND",
                fix=f"Use one of {', '.join(SOURCE_KINDS)}.",
            )
        _check_options(kind, options or {})
        now = self._clock.now()
        return Source(
            id=new_id(now), tenant_id=check_text(tenant_id, "tenant_id"), name=check_name(name), kind=kind,
            options=dict(options or {}), created_at=now, created_by=created_by, updated_at=now,
        )  # fmt: skip

    async def check_source(self, draft: Source) -> None:
        """Check that the table or query of a source exists, with the columns of the source and of its triggers.

        A database that does not answer within seconds is not checked, nor are unchanged options. Raises InvalidInput
        (INVALID_SOURCE_OPTIONS, UNKNOWN_COLUMN).
        """
        existing = await self._run(None, sources.find_source, draft.tenant_id, draft.name)
        if existing is not None and existing.options == draft.options:
            return
        columns = await self._check.list_columns(draft)
        if existing is not None and columns:
            for trigger in await self._run(None, sources.list_triggers_of_source, existing):
                for option, column in trigger.rule.columns():
                    check_column(f"{option} of the trigger {trigger.name!r:.80}", column, columns)

    async def get_source(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Source:
        """Return a source. Raises NotFound (SOURCE_NOT_FOUND)."""
        source = await self._run(connection, sources.find_source, tenant_id, name)
        if source is None:
            raise no_such_source(name)
        return source

    async def list_sources(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Source]:  # fmt: skip
        """Return a page of sources in name order. Raises InvalidInput."""
        page.validate_paging(limit, None)
        return await self._run(None, sources.list_sources, tenant_id, limit, cursor)

    async def delete_source(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Source:
        """Delete a source and its items. Raises NotFound, and Conflict (SOURCE_IN_USE) while it has triggers."""
        source = await self._run(connection, sources.delete_source, tenant_id, name)
        if source is None:
            raise no_such_source(name)
        return source

    async def put_items(
        self, source: str, changes: Iterable[Mapping[str, Any]], *, tenant_id: str = "default", connection: Any = None
    ) -> ChangeSummary:  # fmt: skip
        """Update items of a source: `{"key": "42", "version": 7, "fields": {...}}`, or
        `{"key": "42", "version": 8, "deleted": True}` for a deleted one.

        Their jobs are reconciled in the same transaction, 500 items per transaction. A change that is not newer than
        the stored version is counted as `stale`; a change without a version is always newer. Raises InvalidInput
        (INVALID_ITEM, INVALID_VERSION), NotFound (SOURCE_NOT_FOUND).
        """
        parsed = [_parse_change(change) for change in changes]
        source_row = await self.get_source(source, tenant_id=tenant_id, connection=connection)
        total = ChangeSummary()
        for start in range(0, len(parsed), ITEM_BATCH_SIZE):
            batch = parsed[start : start + ITEM_BATCH_SIZE]
            total.add(await self._run(connection, item_changes.apply_changes, source_row, batch, self._clock.now()))
        return total

    async def list_items(
        self, source: str, *, rejected: bool = False, tenant_id: str = "default", limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Item]:  # fmt: skip
        """Return a page of a source's last known items in key order, or only those whose current row is rejected.

        Raises InvalidInput, NotFound.
        """
        page.validate_paging(limit, None)
        source_row = await self.get_source(source, tenant_id=tenant_id)
        return await self._run(None, sources.list_items, source_row.id, limit, cursor, rejected=rejected)

    async def put(
        self, /, name: str, source: str, column: str, topic: str, *, replace: bool = True, tenant_id: str = "default",
        created_by: str | None = None, connection: Any = None, **options: Unpack[TriggerOptions],
    ) -> tuple[Trigger, Operation | None]:  # fmt: skip
        """Create a trigger, or change an existing one, unless `replace=False`.

        The trigger creates a job of `topic` at each of `offsets` (default `["0"]`) from the instant in `column` of each
        item. Returns the trigger, and the operation that plans the jobs of the existing items; the operation is None
        if the trigger is unchanged.

        `options` are those of `triggers.client.options.TriggerOptions`: when it fires, and the fields of its jobs.

        Without a `connection`, the columns and the query are checked as by `check_rule`. Raises InvalidInput
        (INVALID_OFFSET, INVALID_CONDITION, UNKNOWN_COLUMN, ...), NotFound (SOURCE_NOT_FOUND, TARGET_NOT_FOUND),
        Conflict (TRIGGER_EXISTS, TRIGGER_SOURCE_FIXED).
        """
        if unknown := options.keys() - TriggerOptions.__annotations__:
            raise unknown_options("triggers.put", unknown, TriggerOptions.__annotations__)
        now = self._clock.now()
        source_row = await self._run(connection, sources.find_source, tenant_id, source)
        interval = 0.0 if source_row is None else (await self._scan_intervals(connection, source_row))[source]
        draft = self._draft(name, source, column, topic, options, tenant_id, created_by, now, interval)
        if connection is None:
            await self.check_rule(name, source, draft.rule, tenant_id=tenant_id)
        return await self._run(connection, triggers.upsert_trigger, draft, now, replace=replace)

    async def check_rule(self, name: str, source: str, rule: TriggerRule, *, tenant_id: str = "default") -> None:
        """Check that the rows of a polled source have the columns of a trigger, and that its query can be run.

        The columns are those of the table or query, or, if it does not answer and for boards, those of the last known
        rows. An unchanged rule is not checked. Raises InvalidInput (UNKNOWN_COLUMN, INVALID_CONDITION).
        """
        existing = await self._run(None, sources.find_trigger, tenant_id, name)
        row = await self._run(None, sources.find_source, tenant_id, source)
        if row is None or row.kind not in POLLED_KINDS or (existing is not None and existing.rule == rule):
            return
        columns = await self._check.list_columns(row) or await self._run(None, sources.list_known_columns, row.id)
        if columns:
            for option, column in rule.columns():
                check_column(option, column, columns)
        if rule.unless is not None:
            await self._check.check_query(row, rule.unless, columns)

    def _draft(
        self, name: str, source: str, column: str, topic: str, options: Mapping[str, Any], tenant_id: str,
        created_by: str | None, now: datetime, interval: float,
    ) -> Trigger:  # fmt: skip
        rule = parse_rule(column, options, interval)
        if interval > 0 and rule.grace <= interval:
            raise grace_too_short(name, rule.grace, interval)
        retry, timeout, expires = (options.get(name) for name in ("retry", "timeout", "expires_after"))
        action = Action(
            topic=topic, payload=options.get("payload"), metadata=dict(options.get("metadata") or {}),
            owner_id=options.get("owner_id"), target=options.get("target"), queue=options.get("queue", "default"),
            priority=options.get("priority", 0), group=options.get("group"), retry=Retry.parse(retry),
            timeout=None if timeout is None else parse_seconds(timeout, "timeout", minimum=0.001),
            expires_after=None if expires is None else parse_seconds(expires, "expires_after"),
        )  # fmt: skip
        drafted = Trigger(
            id=new_id(now), tenant_id=check_text(tenant_id, "tenant_id"), name=check_name(name), source_id="",
            source=check_name(source), rule=rule, action=action, created_at=now, created_by=created_by, updated_at=now,
        )  # fmt: skip
        # Validate the action as a job of the trigger.
        sample = JobSpec(
            topic=topic, timezone="UTC", payload=build_payload(drafted, "item", FiringKey("0", "someone"), now),
            owner_id=action.owner_id, metadata=action.metadata or None, retry=action.retry, timeout=action.timeout,
            queue=action.queue, priority=action.priority, group=action.group, target=action.target,
            run_at=now + timedelta(seconds=1),
        )  # fmt: skip
        checked = self._jobs.draft(sample, drafted.id, now)
        target = {"name": checked.target_name} if checked.target_name is not None else decode(checked.target)
        normalized = dataclasses.replace(action, target=target, metadata=decode(checked.metadata) or {})
        return dataclasses.replace(drafted, action=normalized)

    async def get(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Trigger:
        """Return a trigger. Raises NotFound (TRIGGER_NOT_FOUND)."""
        return await self._run_on_trigger(connection, name, sources.find_trigger, tenant_id, name)

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Trigger]:  # fmt: skip
        """Return a page of triggers in name order. Raises InvalidInput."""
        page.validate_paging(limit, None)
        return await self._run(None, sources.list_triggers, tenant_id, limit, cursor)

    async def pause(
        self, name: str, reason: str | None = None, *, tenant_id: str = "default", connection: Any = None
    ) -> Trigger:  # fmt: skip
        """Pause a trigger until `resume`: jobs that become due meanwhile are `skipped (paused)`. Raises NotFound."""
        return await self._run_on_trigger(
            connection, name, triggers.set_enabled, tenant_id, name, reason, self._clock.now(), enabled=False
        )

    async def resume(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Trigger:
        """Resume a trigger. Raises NotFound."""
        return await self._run_on_trigger(
            connection, name, triggers.set_enabled, tenant_id, name, None, self._clock.now(), enabled=True
        )

    async def scan(
        self, name: str, *, tenant_id: str = "default", created_by: str | None = None, connection: Any = None
    ) -> Operation:  # fmt: skip
        """Start an operation that reconciles every item and plans missing jobs. Raises NotFound."""
        trigger = await self.get(name, tenant_id=tenant_id, connection=connection)
        operation = await self._run(connection, triggers.start_scan, trigger, self._clock.now(), created_by)
        return operation

    async def get_item(self, name: str, key: str, *, tenant_id: str = "default") -> ItemHistory:
        """Return an item of a trigger's source: its state, its firings, and its latest jobs. Raises NotFound."""
        trigger = await self.get(name, tenant_id=tenant_id)
        found = await self._run(None, item_history.find_item_history, trigger, key)
        if found is None:
            raise item_history.no_such_item(key)
        return found

    async def why(self, name: str, key: str, *, tenant_id: str = "default") -> builtins.list[str]:
        """Explain in sentences why an item fired, will fire, or did not. Raises NotFound."""
        history = await self.get_item(name, key, tenant_id=tenant_id)
        return explain_item(await self.get(name, tenant_id=tenant_id), history, self._clock.now())

    async def audit(
        self, name: str, from_: datetime, to: datetime, *, tenant_id: str = "default"
    ) -> FiringAudit:  # fmt: skip
        """Compare the desired instants of the items in [from_, to) with the recorded firings.

        The last minute is excluded. Raises InvalidInput (INVALID_RANGE), NotFound.
        """
        start, end = from_us(to_us(from_, "from")), from_us(to_us(to, "to"))
        end = min(end, self._clock.now() - AUDIT_DELAY)
        if start >= end:
            raise InvalidInput(
                f"{from_} to {to} is not a valid time range.", code="INVALID_RANGE",
                fix="Specify a from that is before to, and more than a minute ago.",
            )  # fmt: skip
        trigger, audit = await self.get(name, tenant_id=tenant_id), FiringAudit()
        after: str | None = None
        while (after := await self._run(None, audit_page, trigger, start, end, after, audit)) is not None:
            pass
        return audit

    async def list_not_fired(
        self, name: str, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[FiringRecord]:  # fmt: skip
        """Return a page of the firings that did not become jobs, each with the reason: `late`, `past`, `unreadable`,
        `skipped`. Raises InvalidInput, NotFound.
        """
        page.validate_paging(limit, None)
        trigger = await self.get(name, tenant_id=tenant_id)
        return await self._run(None, item_history.list_not_fired, trigger, limit, cursor)

    async def fire(
        self, name: str, key: str, *, tenant_id: str = "default", connection: Any = None
    ) -> builtins.list[Job]:  # fmt: skip
        """Fire an item now, for each of its recipients; what is planned stays planned. Raises NotFound."""
        trigger = await self.get(name, tenant_id=tenant_id, connection=connection)
        ids = await self._run(connection, item_history.fire_item, trigger, key, self._clock.now())
        jobs = [await self._run(connection, find_job, tenant_id, id_) for id_ in ids]
        return [job for job in jobs if job is not None]

    async def skip(
        self, name: str, key: str, *, tenant_id: str = "default", connection: Any = None
    ) -> builtins.list[FiringRecord]:  # fmt: skip
        """Skip the planned firings of an item; a new date fires again. Returns the skipped ones. Raises NotFound."""
        trigger = await self.get(name, tenant_id=tenant_id, connection=connection)
        return await self._run(connection, item_history.skip_item, trigger, key, self._clock.now())

    async def get_operation(self, operation_id: str, *, tenant_id: str = "default") -> Operation:
        """Return a scan or another operation with its progress. Raises NotFound (OPERATION_NOT_FOUND)."""
        id_ = parse_uuid(operation_id)
        operation = None if id_ is None else await self._run(None, operations.find_operation, tenant_id, id_)
        if operation is None:
            raise NotFound(f"There is no operation {operation_id!s:.60}.", code="OPERATION_NOT_FOUND")
        return operation

    async def delete(
        self, name: str, *, tenant_id: str = "default", created_by: str | None = None, connection: Any = None
    ) -> Operation:  # fmt: skip
        """Delete a trigger: none of its jobs is delivered from now on, and the returned operation cancels them.

        Raises NotFound.
        """
        now = self._clock.now()
        _, operation = await self._run_on_trigger(
            connection, name, triggers.delete_trigger, tenant_id, name, now, created_by
        )
        return operation

    async def _run_on_trigger(
        self, connection: Any, name: str, operation: Callable[..., R | None], *args: Any, **kwargs: Any
    ) -> R:
        result = await self._run(connection, operation, *args, **kwargs)
        if result is None:
            raise no_such_trigger(name)
        return result

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        await self._ensure_open()
        if connection is None:
            return await self._store.run(operation, *args, **kwargs)
        return await self._store.join(connection, operation, *args, **kwargs)


def parse_rule(column: str, options: Mapping[str, Any], interval: float = 0.0) -> TriggerRule:
    """Return the rule of a trigger; `interval` is that of the full reads of its source. Raises InvalidInput."""
    timezone, zone_column, recipients = (options.get(name) for name in ("timezone", "zone_column", "recipients"))
    if timezone is not None:
        timezone = zone(zone_key(timezone)).name
    grace = parse_seconds(options.get("grace", max(DEFAULT_GRACE_SECONDS, 2 * interval)), "grace")
    rule = TriggerRule(
        column=check_text(column, "column"), offsets=parse_offsets(options.get("offsets", ["0"])), timezone=timezone,
        zone_column=None if zone_column is None else check_text(zone_column, "zone_column"),
        edge=parse_edge(options.get("edge", "start")),
        recipients=None if recipients is None else check_text(recipients, "recipients"),
        condition=conditions.parse_comparisons(options.get("condition")), grace=min(grace, MAX_GRACE_SECONDS),
        unless=conditions.parse_query(options.get("unless")),
    )  # fmt: skip
    encode(sources.rule_to_json(rule), "condition")
    return rule


def _check_options(kind: str, options: Any) -> None:
    """Check the options of a source. Raises InvalidInput (INVALID_SOURCE_OPTIONS)."""
    if not isinstance(options, Mapping) or (kind == "webhook" and options):
        raise InvalidInput(
            f"The options are not valid for a source of kind {kind}.", code="INVALID_SOURCE_OPTIONS",
            fix="A webhook source has no options; the others require a mapping.",
        )  # fmt: skip
    encode(dict(options), "options")
    if kind != "webhook":
        # The adapter is only constructed for validation, so references are replaced by valid placeholders.
        placeholders = {"url": "postgresql://host/name", "token": "token", "signingSecret": "secret"}
        references = {name for name, value in options.items() if referenced_secret(value) is not None}
        references |= {
            name for name, value in options.items() if name == "token" and connection_name(value) is not None
        }
        create_adapter(
            kind,
            {name: placeholders.get(name, value) if name in references else value for name, value in options.items()},
        )
        if "url" not in references and has_password(str(options.get("url", ""))):
            raise InvalidInput(
                "The url contains a password, which everyone who can read the source would see.",
                code="INVALID_SOURCE_OPTIONS", fix='Store the url as a secret and use {"secret": "its name"}.',
            )  # fmt: skip


def _parse_change(item: Any) -> ItemChange:
    """Parse an item change. Raises InvalidInput (INVALID_ITEM, INVALID_KEY, INVALID_VERSION, PAYLOAD_...)."""
    if not isinstance(item, Mapping) or not item.keys() <= {"key", "version", "fields", "deleted"}:
        raise _invalid_item(item)
    key, version, fields, gone = (item.get(name) for name in ("key", "version", "fields", "deleted"))
    key = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
    if gone not in (None, True, False) or bool(gone) == isinstance(fields, Mapping) or (gone and fields is not None):
        raise _invalid_item(item)
    new_fields = None if gone else dict(fields)  # type: ignore[arg-type]
    encode(new_fields, "fields")
    return ItemChange(check_text(key, "key"), None if version is None else parse_version(version), new_fields)


def _invalid_item(item: Any) -> InvalidInput:
    return InvalidInput(
        f"{item!r:.80} is not a valid item change.", code="INVALID_ITEM",
        fix='Use {"key": ..., "version": ..., "fields": {...}}, or {"key": ..., "version": ..., "deleted": true}.',
    )  # fmt: skip
