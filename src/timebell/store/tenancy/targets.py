"""Targets under a name: written, listed, disabled; and resolved, with the values of their secrets, for a delivery."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import Row, delete, func, insert, select, union_all, update

from timebell.errors import Conflict, InvalidInput, TimebellError
from timebell.ids import new_id
from timebell.model.page import Page
from timebell.model.payload import encode
from timebell.model.routes import named
from timebell.model.target import NamedTarget, Resolved, filled, secret_names
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.jobs.bind_targets import no_such_target
from timebell.store.jobs.indexes import apart
from timebell.store.jobs.repository import make_tenants
from timebell.store.schema import jobs, schedules, targets
from timebell.store.tenancy import secrets
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import triggers
from timebell.store.types import from_micros, to_micros
from timebell.tenancy.secrets import Box, Keyring

MOST_SIGNING = 5
"""So many signing secrets of a target count at once."""
COUNTED = 1000


def put(
    tx: Transaction, ring: Keyring, target: NamedTarget, signing_secret: str | None, now: datetime, *, replace: bool
) -> NamedTarget:
    """Write a target; the same options again are no edit. A new one gets its signing secret, if there is one.

    Raises Conflict (TARGET_EXISTS, TARGET_KIND_FIXED), InvalidInput (SIGNING_SECRET_KEPT), NotFound, Refused.
    """
    tenant_id, name, options = target.tenant_id, target.name, encode(target.options, "options")
    row = tx.execute(select(targets).where(_mine(tenant_id, name)).with_for_update()).first()
    if row is None:
        make_tenants(tx, {tenant_id}, now)
        signing = []
        if signing_secret is not None:
            opened = secrets.box(tx, ring, tenant_id, now)
            signing = [_signing(opened, tenant_id, name, 1, signing_secret)]
        tx.execute(insert(targets).values(
            tenant_id=tenant_id, name=name, kind=target.kind, options=options, signing=_dump(signing), revision=1,
            created_at=now, created_by=target.created_by, updated_at=now,
        ))  # fmt: skip
        return dataclasses.replace(_found(tx, tenant_id, name, now), signing_secret=signing_secret)
    if not replace:
        raise Conflict(
            f"There is a target {name!r} already.", code="TARGET_EXISTS", existing=name,
            fix="Use another name, or put it to change it.",
        )  # fmt: skip
    if row.kind != target.kind:
        raise Conflict(
            f"The target {name!r} is of kind {row.kind}, and jobs wait for that.", code="TARGET_KIND_FIXED",
            existing=name, fix="Make another target, and point what uses this one to it.",
        )  # fmt: skip
    if signing_secret is not None:
        raise InvalidInput(
            f"The target {name!r} has a signing secret.", code="SIGNING_SECRET_KEPT", fix="Rotate it: rotate-secret."
        )
    if orjson.loads(row.options) != orjson.loads(options):
        values = {"options": options, "revision": row.revision + 1, "updated_at": now}
        tx.execute(update(targets).where(_mine(tenant_id, name)).values(**values))
    return _found(tx, tenant_id, name, now)


def find(tx: Transaction, tenant_id: str, name: str, now: datetime) -> NamedTarget | None:
    """A target of a tenant."""
    row = tx.execute(select(targets).where(_mine(tenant_id, name))).first()
    return None if row is None else _read(row, now)


def page(tx: Transaction, tenant_id: str, limit: int, after: str | None, now: datetime) -> Page[NamedTarget]:
    """Targets of a tenant, by name."""
    query = select(targets).where(targets.c.tenant_id == tenant_id).order_by(targets.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(targets.c.name > after)
    found = [_read(row, now) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def remove(tx: Transaction, tenant_id: str, name: str, now: datetime) -> NamedTarget | None:
    """Forget a target; None for an unknown one. Raises Conflict (TARGET_IN_USE) while schedules or jobs name it."""
    row = tx.execute(select(targets).where(_mine(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    by_name = (schedules.c.tenant_id == tenant_id) & (schedules.c.target == name)
    using = tx.execute(select(func.count()).select_from(schedules).where(by_name)).scalar_one()
    text = encode(named(row.kind, name), "target")
    mine_live = select(jobs.c.id).where(jobs.c.tenant_id == tenant_id, jobs.c.target == text).limit(COUNTED + 1)
    both = union_all(*(select(each.subquery()) for each in apart(mine_live))).subquery()  # at once: one may go over
    live = tx.execute(select(func.count()).select_from(both)).scalar_one()
    mine = (triggers.c.tenant_id == tenant_id) & triggers.c.action.contains(f'"target":{text}', autoescape=True)
    watching = tx.execute(select(func.count()).select_from(triggers).where(mine)).scalar_one()
    if using or live or watching:
        jobs_said = f"more than {COUNTED:,}" if live > COUNTED else f"{live:,}"
        triggers_said = f", {watching:,} trigger{'s'[: watching != 1]}" if watching else ""
        raise Conflict(
            f"The target {name!r} is used by {using:,} schedule{'s'[: using != 1]}{triggers_said} and {jobs_said}"
            f" pending job{'s'[: live != 1]}.",
            code="TARGET_IN_USE", existing=name, fix="Point these elsewhere or delete them first.",
        )  # fmt: skip
    tx.execute(delete(targets).where(_mine(tenant_id, name)))
    return _read(row, now)


def rotate(
    tx: Transaction, ring: Keyring, tenant_id: str, name: str, signing_secret: str, overlap: timedelta, now: datetime
) -> NamedTarget | None:
    """A new signing secret; those before it count for `overlap` longer, or as long as they did. None for an unknown
    target. Raises Conflict (SIGNING_SECRETS_MANY), InvalidInput (TARGET_UNSIGNED)."""
    row = tx.execute(select(targets).where(_mine(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    had = orjson.loads(row.signing)
    if not had:
        raise InvalidInput(f"A target of kind {row.kind} signs nothing.", code="TARGET_UNSIGNED")
    until = to_micros(now + overlap)
    ending = [{**one, "until": until if one["until"] is None else min(one["until"], until)} for one in had]
    kept = [one for one in ending if one["until"] > to_micros(now)]
    if len(kept) >= MOST_SIGNING:
        raise Conflict(
            f"{len(kept)} signing secrets of the target {name!r} count yet.", code="SIGNING_SECRETS_MANY",
            existing=name, fix="Wait until one ends, or rotate with an overlap of 0, which ends them now.",
        )  # fmt: skip
    opened = secrets.box(tx, ring, tenant_id, now)
    new = _signing(opened, tenant_id, name, max(one["number"] for one in had) + 1, signing_secret)
    values = {"signing": _dump([new, *kept]), "revision": row.revision + 1, "updated_at": now}
    tx.execute(update(targets).where(_mine(tenant_id, name)).values(**values))
    return dataclasses.replace(_found(tx, tenant_id, name, now), signing_secret=signing_secret)


def enable(tx: Transaction, tenant_id: str, name: str, now: datetime) -> NamedTarget | None:
    """Let it be delivered to again; None for an unknown one."""
    values = {"disabled_at": None, "disabled_reason": None, "updated_at": now}
    tx.execute(update(targets).where(_mine(tenant_id, name), targets.c.disabled_at.is_not(None)).values(**values))
    return find(tx, tenant_id, name, now)


def disable(tx: Transaction, tenant_id: str, name: str, revision: int, reason: str, now: datetime) -> bool:
    """Send it nothing more, unless it was edited since this revision; whether that changed anything. It is recorded
    as a change that Timebell made."""
    mine = _mine(tenant_id, name) & (targets.c.revision == revision) & targets.c.disabled_at.is_(None)
    if not tx.execute(update(targets).where(mine).values(disabled_at=now, disabled_reason=reason)).rowcount:
        return False
    audit_log.write(tx, AuditRecord(
        id=new_id(now), tenant_id=tenant_id, at=now, actor="timebell", action="target.disable", subject=name,
    ))  # fmt: skip
    return True


Key = tuple[str, str]
"""Tenant and name."""


def resolve(
    tx: Transaction, ring: Keyring, keys: Iterable[Key], now: datetime
) -> dict[Key, Resolved | TimebellError]:  # fmt: skip
    """Targets as they are now, with the values of their secrets; or what is wrong with one."""
    found: dict[Key, Resolved | TimebellError] = {}
    by_tenant: dict[str, set[str]] = {}
    for tenant_id, name in keys:
        by_tenant.setdefault(tenant_id, set()).add(name)
    for tenant_id, names in by_tenant.items():
        mine = (targets.c.tenant_id == tenant_id) & targets.c.name.in_(sorted(names))
        rows = {row.name: row for row in tx.execute(select(targets).where(mine))}
        for name in names:
            try:
                found[tenant_id, name] = _resolved(tx, ring, tenant_id, name, rows.get(name), now)
            except TimebellError as wrong:
                found[tenant_id, name] = wrong
    return found


def _resolved(
    tx: Transaction, ring: Keyring, tenant_id: str, name: str, row: Row[Any] | None, now: datetime
) -> Resolved:  # fmt: skip
    if row is None:
        raise no_such_target(name)
    options = orjson.loads(row.options)
    values = secrets.values(tx, ring, tenant_id, secret_names(options))
    signing = _open(tx, ring, tenant_id, name, row, now)
    options = filled(options, values)
    return Resolved(
        name=name, kind=row.kind, revision=row.revision, secrets=(*values.values(), *signing),
        options={**options, "signingSecrets": signing} if signing else options,
        disabled=None if row.disabled_at is None else row.disabled_reason,
    )  # fmt: skip


def _open(tx: Transaction, ring: Keyring, tenant_id: str, name: str, row: Row[Any], now: datetime) -> list[str]:
    """The signing secrets that count, the newest first."""
    counting = [one for one in orjson.loads(row.signing) if _counts(one, now)]
    if not counting:
        return []
    opened = secrets.opener(tx, ring, tenant_id)
    assert opened is not None
    return [opened.open(one["sealed"], _place(tenant_id, name, one["number"])) for one in counting]


def _counts(one: dict[str, Any], now: datetime) -> bool:
    return one["until"] is None or one["until"] > to_micros(now)


def disabled(tx: Transaction, most: int) -> tuple[int, list[str]]:
    """How many targets are disabled, and some of them by name."""
    off = targets.c.disabled_at.is_not(None)
    many = tx.execute(select(func.count()).select_from(targets).where(off)).scalar_one()
    rows = tx.execute(
        select(targets.c.tenant_id, targets.c.name).where(off).order_by(targets.c.disabled_at).limit(most)
    )
    return many, [row.name if row.tenant_id == "default" else f"{row.tenant_id}/{row.name}" for row in rows]


def used_secrets(tx: Transaction, tenant_id: str, name: str) -> Collection[str]:
    """The secrets that a target refers to by now; none for an unknown one."""
    row = tx.execute(select(targets.c.options).where(_mine(tenant_id, name)).with_for_update()).first()
    return set() if row is None else secret_names(orjson.loads(row.options))


def _found(tx: Transaction, tenant_id: str, name: str, now: datetime) -> NamedTarget:
    return _read(tx.execute(select(targets).where(_mine(tenant_id, name))).one(), now)


def _mine(tenant_id: str, name: str) -> Any:
    return (targets.c.tenant_id == tenant_id) & (targets.c.name == name)


def _signing(opened: Box, tenant_id: str, name: str, number: int, value: str) -> dict[str, Any]:
    return {"number": number, "sealed": opened.seal(value, _place(tenant_id, name, number)), "until": None}


def _place(tenant_id: str, name: str, number: int) -> tuple[str | int, ...]:
    return tenant_id, "timebell_targets", name, "signing", number


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()


def _read(row: Row[Any], now: datetime) -> NamedTarget:
    counting = [one for one in orjson.loads(row.signing) if _counts(one, now)]
    return NamedTarget(
        tenant_id=row.tenant_id, name=row.name, kind=row.kind, options=orjson.loads(row.options), revision=row.revision,
        signing=tuple(None if one["until"] is None else from_micros(one["until"]) for one in counting),
        disabled_at=row.disabled_at, disabled_reason=row.disabled_reason, created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip
