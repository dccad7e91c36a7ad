"""Connections as rows: tokens written and opened, renewed by one node at a time, and given anew by somebody."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import Row, delete, insert, or_, select, update

from timebell.errors import Conflict, NotFound
from timebell.model.connection import LOST, Connection, Tokens, connection_of
from timebell.model.job import JobState, Kind
from timebell.model.page import Page
from timebell.model.trigger import UNAUTHORISED
from timebell.store.schema import jobs
from timebell.store.tenancy.secrets import box, opener
from timebell.store.transaction import Transaction
from timebell.store.triggers.tables import connections, firings, sources, triggers
from timebell.tenancy.secrets import Keyring


def put(
    tx: Transaction, ring: Keyring, wanted: Connection, tokens: Tokens, now: datetime, *, replace: bool | None
) -> Connection:  # fmt: skip
    """Write a connection with its tokens: a new one, or others for the one there is, and what waited for them goes on.

    With `replace=False` only a new one, with True only in place of another; that keeps its client, where none is
    given. Raises Conflict (CONNECTION_EXISTS), NotFound (CONNECTION_NOT_FOUND), Refused (SECRET_UNREADABLE).
    """
    sealing = box(tx, ring, wanted.tenant_id, now)
    row = tx.execute(select(connections).where(_mine(wanted.tenant_id, wanted.name)).with_for_update()).first()
    if row is not None and replace is False:
        raise Conflict(
            f"There is a connection {wanted.name!r} already.", code="CONNECTION_EXISTS", existing=wanted.name,
            fix="Give it new tokens, or use another name.",
        )  # fmt: skip
    if row is None and replace is True:
        raise no_such_connection(wanted.name)
    values: dict[str, Any] = {
        "expires_at": wanted.expires_at, "renewed_at": now, "unauthorised": False, "fault": None,
        "renewing_until": None, "updated_at": now,
    }  # fmt: skip
    if row is None:
        place = _place(wanted.tenant_id, wanted.name, 1)
        tx.execute(insert(connections).values(
            tenant_id=wanted.tenant_id, name=wanted.name, token_url=wanted.token_url, client_id=wanted.client_id,
            sealed=sealing.seal(_written(tokens), place), version=1, created_at=now, created_by=wanted.created_by,
            **values,
        ))  # fmt: skip
    else:
        before = _tokens(sealing.open(row.sealed, _place(wanted.tenant_id, wanted.name, row.version)))
        kept = Tokens(
            access=tokens.access, refresh=tokens.refresh, client_secret=tokens.client_secret or before.client_secret
        )
        place = _place(wanted.tenant_id, wanted.name, row.version + 1)
        values |= {"sealed": sealing.seal(_written(kept), place), "version": row.version + 1}
        if replace is None:
            values |= {"token_url": wanted.token_url, "client_id": wanted.client_id or row.client_id}
        tx.execute(update(connections).where(_mine(wanted.tenant_id, wanted.name)).values(**values))
        _go_on(tx, wanted.tenant_id, wanted.name, now)
    return _read(tx.execute(select(connections).where(_mine(wanted.tenant_id, wanted.name))).one())


def find(tx: Transaction, tenant_id: str, name: str) -> Connection | None:
    """A connection, without its tokens."""
    row = tx.execute(select(connections).where(_mine(tenant_id, name))).first()
    return None if row is None else _read(row)


def page(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Connection]:
    """Connections of a tenant by name, without their tokens."""
    query = select(connections).where(connections.c.tenant_id == tenant_id).order_by(connections.c.name)
    if after is not None:
        query = query.where(connections.c.name > after)
    found = [_read(row) for row in tx.execute(query.limit(limit + 1))]
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def remove(tx: Transaction, tenant_id: str, name: str) -> Connection | None:
    """Forget one; None for an unknown one. Raises Conflict (CONNECTION_IN_USE) while a source is read by it."""
    row = tx.execute(select(connections).where(_mine(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    users = [one.name for one in _sources(tx, tenant_id, name)]
    if users:
        raise Conflict(
            f"The connection {name!r} is used by {len(users)} source{'s'[: len(users) > 1]}, {users[0]} first.",
            code="CONNECTION_IN_USE", existing=users[0], fix="Change or delete these first.",
        )  # fmt: skip
    tx.execute(delete(connections).where(_mine(tenant_id, name)))
    return _read(row)


def opened(tx: Transaction, ring: Keyring, tenant_id: str, name: str) -> tuple[Connection, Tokens]:
    """A connection and its tokens. Raises NotFound (CONNECTION_NOT_FOUND), Refused (SECRET_UNREADABLE)."""
    row = tx.execute(select(connections).where(_mine(tenant_id, name))).first()
    if row is None:
        raise no_such_connection(name)
    opening = opener(tx, ring, tenant_id)
    assert opening is not None
    return _read(row), _tokens(opening.open(row.sealed, _place(tenant_id, name, row.version)))


def take(tx: Transaction, seen: Connection, now: datetime, lasts: timedelta) -> bool:
    """Become the one who renews these tokens, for so long; False while another one is, or they are renewed already."""
    free = or_(connections.c.renewing_until.is_(None), connections.c.renewing_until <= now)
    same = _mine(seen.tenant_id, seen.name) & (connections.c.version == seen.version) & ~connections.c.unauthorised
    return tx.execute(update(connections).where(same, free).values(renewing_until=now + lasts)).rowcount == 1


def renewed(
    tx: Transaction, ring: Keyring, seen: Connection, tokens: Tokens, expires_at: datetime | None, now: datetime
) -> bool:
    """Keep the tokens that came for those that were seen; False if these are the last ones no more.

    Whether the lease is still held does not matter: the tokens are newer than those they came for, which may be
    worth nothing any more.
    """
    sealed = box(tx, ring, seen.tenant_id, now).seal(
        _written(tokens), _place(seen.tenant_id, seen.name, seen.version + 1)
    )
    same = _mine(seen.tenant_id, seen.name) & (connections.c.version == seen.version)
    values: dict[str, Any] = {
        "sealed": sealed, "version": seen.version + 1, "expires_at": expires_at, "renewed_at": now,
        "unauthorised": False, "fault": None, "renewing_until": None, "updated_at": now,
    }  # fmt: skip
    done = tx.execute(update(connections).where(same).values(**values)).rowcount == 1
    if done:
        _go_on(tx, seen.tenant_id, seen.name, now)
    return done


def refused(tx: Transaction, seen: Connection, now: datetime) -> None:
    """These tokens cannot be renewed: somebody has to give new ones."""
    same = _mine(seen.tenant_id, seen.name) & (connections.c.version == seen.version)
    values = {"unauthorised": True, "fault": LOST, "renewing_until": None, "updated_at": now}
    tx.execute(update(connections).where(same).values(**values))


def failed(tx: Transaction, seen: Connection, why: str, until: datetime) -> None:
    """They could not be renewed just now, and nobody tries again before `until`."""
    same = _mine(seen.tenant_id, seen.name) & (connections.c.version == seen.version)
    tx.execute(update(connections).where(same).values(fault=why[:1000], renewing_until=until))


def _go_on(tx: Transaction, tenant_id: str, name: str, now: datetime) -> None:
    """What waits for the tokens is tried now, and not at the end of its pause."""
    ids = [one.id for one in _sources(tx, tenant_id, name)]
    if not ids:
        return
    mine = sources.c.id.in_(ids) & (sources.c.fault_code == UNAUTHORISED)
    tx.execute(update(sources).where(mine).values(fault=None, fault_code=None))
    of = select(firings.c.job_id).join(triggers, triggers.c.id == firings.c.trigger_id)
    waiting = (
        (jobs.c.kind == Kind.TRIGGER) & (jobs.c.state == JobState.PENDING) & (jobs.c.run_at > now)
        & (jobs.c.attempt > 0) & jobs.c.errors.contains(f'"{UNAUTHORISED}"')
    )  # fmt: skip
    query = update(jobs).where(jobs.c.id.in_(of.where(triggers.c.source_id.in_(ids))), waiting)
    if tx.execute(query.values(run_at=now)).rowcount:
        tx.notify()


def _sources(tx: Transaction, tenant_id: str, name: str) -> list[Row[Any]]:
    rows = tx.execute(select(sources).where(sources.c.tenant_id == tenant_id).order_by(sources.c.name))
    return [row for row in rows if connection_of(orjson.loads(row.options).get("token")) == name]


def no_such_connection(name: str) -> NotFound:
    """The error for a name that nobody has."""
    return NotFound(
        f"There is no connection {name!r:.80}.", code="CONNECTION_NOT_FOUND", fix="timebell connection list shows them."
    )


def _written(tokens: Tokens) -> str:
    return orjson.dumps(asdict(tokens)).decode()


def _tokens(text: str) -> Tokens:
    return Tokens(**orjson.loads(text))


def _mine(tenant_id: str, name: str) -> Any:
    return (connections.c.tenant_id == tenant_id) & (connections.c.name == name)


def _place(tenant_id: str, name: str, version: int) -> tuple[str | int, ...]:
    return tenant_id, "timebell_connections", name, "sealed", version


def _read(row: Row[Any]) -> Connection:
    return Connection(
        tenant_id=row.tenant_id, name=row.name, token_url=row.token_url, client_id=row.client_id, version=row.version,
        expires_at=row.expires_at, renewed_at=row.renewed_at, unauthorised=row.unauthorised, fault=row.fault,
        renewing_until=row.renewing_until, created_at=row.created_at, created_by=row.created_by,
        updated_at=row.updated_at,
    )  # fmt: skip
