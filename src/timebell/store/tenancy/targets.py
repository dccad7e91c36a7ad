"""Repository of named targets: create, list, disable, and resolve with decrypted secrets for a delivery."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import Row, delete, func, insert, select, union_all, update

from timebell.errors import Conflict, InvalidInput, TimebellError
from timebell.feature import Feature
from timebell.ids import new_id
from timebell.model.page import Page
from timebell.model.payload import encode
from timebell.model.routes import named_target
from timebell.model.target import NamedTarget, ResolvedTarget, fill_secrets, secret_names, target_limits
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.jobs import target_queues
from timebell.store.jobs.bind_targets import target_not_found
from timebell.store.jobs.indexes import split_by_running
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import jobs, schedules, targets
from timebell.store.tenancy import secrets
from timebell.store.transaction import Transaction
from timebell.store.types import from_micros, to_micros
from timebell.tenancy.secrets import Keyring, TenantCipher

MAX_SIGNING_SECRETS = 5
"""Maximum number of simultaneously valid signing secrets of a target."""
MAX_JOB_COUNT = 1000


def upsert_target(
    tx: Transaction, keyring: Keyring, target: NamedTarget, signing_secret: str | None, now: datetime, *, replace: bool
) -> NamedTarget:
    """Store a target; identical options are not an edit. A new target gets `signing_secret`, if there is one.

    Raises Conflict (TARGET_EXISTS, TARGET_KIND_FIXED), InvalidInput (SIGNING_SECRET_FIXED), NotFound, Refused.
    """
    tenant_id, name, options = target.tenant_id, target.name, encode(target.options, "options")
    row = tx.execute(select(targets).where(_by_name(tenant_id, name)).with_for_update()).first()
    if row is None:
        ensure_tenants(tx, {tenant_id}, now)
        signing = []
        if signing_secret is not None:
            cipher = secrets.get_or_create_cipher(tx, keyring, tenant_id, now)
            signing = [_encrypt_signing_secret(cipher, tenant_id, name, 1, signing_secret)]
        tx.execute(insert(targets).values(
            tenant_id=tenant_id, name=name, kind=target.kind, options=options, signing=_to_json(signing), revision=1,
            created_at=now, created_by=target.created_by, updated_at=now,
        ))  # fmt: skip
        _apply_limits(tx, target)
        return dataclasses.replace(_get_target(tx, tenant_id, name, now), signing_secret=signing_secret)
    if not replace:
        raise Conflict(
            f"A target named {name!r} already exists.", code="TARGET_EXISTS", existing=name,
            fix="Use another name, or replace the target with PUT.",
        )  # fmt: skip
    if row.kind != target.kind:
        raise Conflict(
            f"The target {name!r} is of kind {row.kind}, which cannot change because jobs may be waiting for it.",
            code="TARGET_KIND_FIXED", existing=name,
            fix="Create another target and change its users to the new name.",
        )  # fmt: skip
    if signing_secret is not None:
        raise InvalidInput(
            f"The target {name!r} already has a signing secret.",
            code="SIGNING_SECRET_FIXED",
            fix="Rotate it: timebell target rotate-secret.",
        )
    if orjson.loads(row.options) != orjson.loads(options):
        values = {"options": options, "revision": row.revision + 1, "updated_at": now}
        tx.execute(update(targets).where(_by_name(tenant_id, name)).values(**values))
        _apply_limits(tx, target)
    return _get_target(tx, tenant_id, name, now)


def _apply_limits(tx: Transaction, target: NamedTarget) -> None:
    """Set the limits of a target's queue."""
    if target.kind == target_queues.KIND:
        target_queues.set_target_limits(tx, target.tenant_id, target.name, target_limits(target.options))


def find_target(tx: Transaction, tenant_id: str, name: str, now: datetime, *, lock: bool = False) -> NamedTarget | None:
    """Return a target of a tenant by name, optionally locked for a change; None if there is none."""
    query = select(targets).where(_by_name(tenant_id, name))
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else _target_from_row(row, now)


def list_targets(tx: Transaction, tenant_id: str, limit: int, after: str | None, now: datetime) -> Page[NamedTarget]:
    """Return a page of a tenant's targets in name order."""
    query = select(targets).where(targets.c.tenant_id == tenant_id).order_by(targets.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(targets.c.name > after)
    page = [_target_from_row(row, now) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def delete_target(
    tx: Transaction, tenant_id: str, name: str, now: datetime, features: Sequence[Feature]
) -> NamedTarget | None:  # fmt: skip
    """Delete a target; None for an unknown one.

    Raises Conflict (TARGET_IN_USE) while schedules, live jobs or objects of `features` use it.
    """
    row = tx.execute(select(targets).where(_by_name(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    schedules_of_target = (schedules.c.tenant_id == tenant_id) & (schedules.c.target == name)
    schedule_count = tx.execute(select(func.count()).select_from(schedules).where(schedules_of_target)).scalar_one()
    target = named_target(row.kind, name)
    target_json = encode(target, "target")
    live_jobs = (
        select(jobs.c.id).where(jobs.c.tenant_id == tenant_id, jobs.c.target == target_json).limit(MAX_JOB_COUNT + 1)
    )
    # One statement over both halves, because a job may start between two statements.
    halves = union_all(*(select(half.subquery()) for half in split_by_running(live_jobs))).subquery()
    job_count = tx.execute(select(func.count()).select_from(halves)).scalar_one()
    counts = {"schedule": schedule_count}
    for feature in features:
        counts |= {noun: count for noun, count in feature.count_target_users(tx, tenant_id, target).items() if count}
    if job_count or any(counts.values()):
        jobs_text = f"more than {MAX_JOB_COUNT:,}" if job_count > MAX_JOB_COUNT else f"{job_count:,}"
        users = [f"{count:,} {noun}{'s'[: count != 1]}" for noun, count in counts.items()]
        raise Conflict(
            f"The target {name!r} is used by {', '.join(users)} and {jobs_text} pending job{'s'[: job_count != 1]}.",
            code="TARGET_IN_USE", existing=name, fix="Delete these or give them another target first.",
        )  # fmt: skip
    tx.execute(delete(targets).where(_by_name(tenant_id, name)))
    if row.kind == target_queues.KIND:
        target_queues.set_target_limits(tx, tenant_id, name, None)
    return _target_from_row(row, now)


def rotate_signing_secret(
    tx: Transaction, keyring: Keyring, tenant_id: str, name: str, signing_secret: str, overlap: timedelta, now: datetime
) -> NamedTarget | None:
    """Add a new signing secret; earlier ones stay valid for `overlap` at most. None for an unknown target.

    Raises Conflict (TOO_MANY_SIGNING_SECRETS), InvalidInput (TARGET_UNSIGNED).
    """
    row = tx.execute(select(targets).where(_by_name(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    existing = orjson.loads(row.signing)
    if not existing:
        raise InvalidInput(
            f"A target of kind {row.kind} has no signing secret.", code="TARGET_UNSIGNED",
            fix="Only HTTP targets sign their requests.",
        )  # fmt: skip
    until = to_micros(now + overlap)
    expiring = [{**one, "until": until if one["until"] is None else min(one["until"], until)} for one in existing]
    valid = [one for one in expiring if one["until"] > to_micros(now)]
    if len(valid) >= MAX_SIGNING_SECRETS:
        raise Conflict(
            f"The target {name!r} has {len(valid)} valid signing secrets, the maximum.",
            code="TOO_MANY_SIGNING_SECRETS", existing=name,
            fix="Wait until one expires, or rotate with an overlap of 0, which expires them now.",
        )  # fmt: skip
    cipher = secrets.get_or_create_cipher(tx, keyring, tenant_id, now)
    new_secret = _encrypt_signing_secret(
        cipher, tenant_id, name, max(one["number"] for one in existing) + 1, signing_secret
    )
    values = {"signing": _to_json([new_secret, *valid]), "revision": row.revision + 1, "updated_at": now}
    tx.execute(update(targets).where(_by_name(tenant_id, name)).values(**values))
    return dataclasses.replace(_get_target(tx, tenant_id, name, now), signing_secret=signing_secret)


def enable_target(tx: Transaction, tenant_id: str, name: str, now: datetime) -> NamedTarget | None:
    """Enable a disabled target; None for an unknown one."""
    values = {"disabled_at": None, "disabled_reason": None, "updated_at": now}
    tx.execute(update(targets).where(_by_name(tenant_id, name), targets.c.disabled_at.is_not(None)).values(**values))
    return find_target(tx, tenant_id, name, now)


def disable_target(tx: Transaction, tenant_id: str, name: str, revision: int, reason: str, now: datetime) -> bool:
    """Disable a target, unless it was edited since this revision; return whether it was disabled.

    The audit log records the change with the actor `timebell`.
    """
    matches = _by_name(tenant_id, name) & (targets.c.revision == revision) & targets.c.disabled_at.is_(None)
    if not tx.execute(update(targets).where(matches).values(disabled_at=now, disabled_reason=reason)).rowcount:
        return False
    audit_log.write_record(tx, AuditRecord(
        id=new_id(now), tenant_id=tenant_id, at=now, actor="timebell", actor_kind="engine", action="target.disable",
        subject=name, subject_name=name, before={"disabledReason": None}, after={"disabledReason": reason},
    ))  # fmt: skip
    return True


TargetKey = tuple[str, str]
"""Tenant and name."""


def resolve_targets(
    tx: Transaction, keyring: Keyring, keys: Iterable[TargetKey], now: datetime
) -> dict[TargetKey, ResolvedTarget | TimebellError]:  # fmt: skip
    """Return targets with their decrypted secrets, or the error of a target that cannot be resolved, by key."""
    resolved: dict[TargetKey, ResolvedTarget | TimebellError] = {}
    by_tenant: dict[str, set[str]] = {}
    for tenant_id, name in keys:
        by_tenant.setdefault(tenant_id, set()).add(name)
    for tenant_id, names in by_tenant.items():
        matches = (targets.c.tenant_id == tenant_id) & targets.c.name.in_(sorted(names))
        rows = {row.name: row for row in tx.execute(select(targets).where(matches))}
        for name in names:
            try:
                resolved[tenant_id, name] = _resolve_target(tx, keyring, tenant_id, name, rows.get(name), now)
            except TimebellError as error:
                resolved[tenant_id, name] = error
    return resolved


def _resolve_target(
    tx: Transaction, keyring: Keyring, tenant_id: str, name: str, row: Row[Any] | None, now: datetime
) -> ResolvedTarget:  # fmt: skip
    if row is None:
        raise target_not_found(name)
    options = orjson.loads(row.options)
    values = secrets.decrypt_values(tx, keyring, tenant_id, secret_names(options))
    signing = _decrypt_signing_secrets(tx, keyring, tenant_id, name, row, now)
    options = fill_secrets(options, values)
    return ResolvedTarget(
        name=name, kind=row.kind, revision=row.revision, secrets=(*values.values(), *signing),
        options={**options, "signingSecrets": signing} if signing else options,
        disabled_reason=None if row.disabled_at is None else row.disabled_reason,
    )  # fmt: skip


def _decrypt_signing_secrets(
    tx: Transaction, keyring: Keyring, tenant_id: str, name: str, row: Row[Any], now: datetime
) -> list[str]:
    """Return the valid signing secrets, newest first."""
    valid = [one for one in orjson.loads(row.signing) if _is_valid(one, now)]
    if not valid:
        return []
    cipher = secrets.find_cipher(tx, keyring, tenant_id)
    assert cipher is not None
    return [cipher.decrypt(one["sealed"], _associated_data(tenant_id, name, one["number"])) for one in valid]


def _is_valid(secret: dict[str, Any], now: datetime) -> bool:
    return secret["until"] is None or secret["until"] > to_micros(now)


def summarize_disabled(tx: Transaction, limit: int) -> tuple[int, list[str]]:
    """Return the number of disabled targets, and the names of up to `limit` of them."""
    is_disabled = targets.c.disabled_at.is_not(None)
    count = tx.execute(select(func.count()).select_from(targets).where(is_disabled)).scalar_one()
    rows = tx.execute(
        select(targets.c.tenant_id, targets.c.name).where(is_disabled).order_by(targets.c.disabled_at).limit(limit)
    )
    return count, [row.name if row.tenant_id == "default" else f"{row.tenant_id}/{row.name}" for row in rows]


def list_referenced_secrets(tx: Transaction, tenant_id: str, name: str) -> Collection[str]:
    """Return the names of secrets that a target refers to, and lock the target; empty for an unknown one."""
    row = tx.execute(select(targets.c.options).where(_by_name(tenant_id, name)).with_for_update()).first()
    return set() if row is None else secret_names(orjson.loads(row.options))


def _get_target(tx: Transaction, tenant_id: str, name: str, now: datetime) -> NamedTarget:
    return _target_from_row(tx.execute(select(targets).where(_by_name(tenant_id, name))).one(), now)


def _by_name(tenant_id: str, name: str) -> Any:
    return (targets.c.tenant_id == tenant_id) & (targets.c.name == name)


def _encrypt_signing_secret(cipher: TenantCipher, tenant_id: str, name: str, number: int, value: str) -> dict[str, Any]:
    return {"number": number, "sealed": cipher.encrypt(value, _associated_data(tenant_id, name, number)), "until": None}


def _associated_data(tenant_id: str, name: str, number: int) -> tuple[str | int, ...]:
    return tenant_id, "timebell_targets", name, "signing", number


def _to_json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _target_from_row(row: Row[Any], now: datetime) -> NamedTarget:
    valid = [one for one in orjson.loads(row.signing) if _is_valid(one, now)]
    return NamedTarget(
        tenant_id=row.tenant_id, name=row.name, kind=row.kind, options=orjson.loads(row.options), revision=row.revision,
        signing_valid_until=tuple(None if one["until"] is None else from_micros(one["until"]) for one in valid),
        disabled_at=row.disabled_at, disabled_reason=row.disabled_reason, created_at=row.created_at,
        created_by=row.created_by, updated_at=row.updated_at,
    )  # fmt: skip
