"""Connection repository: encrypted OAuth tokens, renewed by one node at a time, and replaced by a user."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import Row, delete, insert, or_, select, update

from timebell.errors import Conflict, NotFound
from timebell.features.triggers.model.connection import REAUTHORIZATION_MESSAGE, Connection, Tokens, connection_name
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED
from timebell.features.triggers.store.sources import SOURCES
from timebell.features.triggers.store.tables import connections, firings, triggers
from timebell.model.job import JobState, Kind
from timebell.model.page import Page
from timebell.store.schema import jobs, sources
from timebell.store.tenancy.secrets import find_cipher, get_or_create_cipher
from timebell.store.transaction import JOBS, Transaction
from timebell.tenancy.secrets import Keyring


def upsert_connection(
    tx: Transaction, keyring: Keyring, connection: Connection, tokens: Tokens, now: datetime, *, replace: bool | None
) -> Connection:  # fmt: skip
    """Store a connection with its tokens: only a new one (`replace` False), only an existing one (True), or either.

    An existing connection keeps its client secret if none is specified. With `replace` True it keeps its token URL and
    client id, with None its client id if none is specified. Jobs that wait for the tokens are resumed.

    Raises Conflict (CONNECTION_EXISTS), NotFound (CONNECTION_NOT_FOUND), Refused (SECRET_UNREADABLE).
    """
    cipher = get_or_create_cipher(tx, keyring, connection.tenant_id, now)
    row = tx.execute(
        select(connections).where(_by_name(connection.tenant_id, connection.name)).with_for_update()
    ).first()
    if row is not None and replace is False:
        raise Conflict(
            f"A connection named {connection.name!r} already exists.", code="CONNECTION_EXISTS",
            existing=connection.name, fix="Replace its tokens, or use another name.",
        )  # fmt: skip
    if row is None and replace is True:
        raise no_such_connection(connection.name)
    values: dict[str, Any] = {
        "expires_at": connection.expires_at, "renewed_at": now, "unauthorized": False, "error": None,
        "renewing_until": None, "updated_at": now,
    }  # fmt: skip
    if row is None:
        associated_data = _associated_data(connection.tenant_id, connection.name, 1)
        tx.execute(insert(connections).values(
            tenant_id=connection.tenant_id, name=connection.name, token_url=connection.token_url,
            client_id=connection.client_id, sealed=cipher.encrypt(_tokens_to_json(tokens), associated_data), version=1,
            created_at=now, created_by=connection.created_by, **values,
        ))  # fmt: skip
    else:
        previous = _tokens_from_json(
            cipher.decrypt(row.sealed, _associated_data(connection.tenant_id, connection.name, row.version))
        )
        new_tokens = Tokens(
            access=tokens.access, refresh=tokens.refresh, client_secret=tokens.client_secret or previous.client_secret
        )
        associated_data = _associated_data(connection.tenant_id, connection.name, row.version + 1)
        values |= {
            "sealed": cipher.encrypt(_tokens_to_json(new_tokens), associated_data),
            "version": row.version + 1,
        }
        if replace is None:
            values |= {"token_url": connection.token_url, "client_id": connection.client_id or row.client_id}
        tx.execute(update(connections).where(_by_name(connection.tenant_id, connection.name)).values(**values))
        _resume_waiting(tx, connection.tenant_id, connection.name, now)
    return _connection_from_row(
        tx.execute(select(connections).where(_by_name(connection.tenant_id, connection.name))).one()
    )


def find_connection(tx: Transaction, tenant_id: str, name: str, *, lock: bool = False) -> Connection | None:
    """Return a connection without its tokens; None if there is none."""
    query = select(connections).where(_by_name(tenant_id, name))
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else _connection_from_row(row)


def list_connections(tx: Transaction, tenant_id: str, limit: int, after: str | None) -> Page[Connection]:
    """Return a page of a tenant's connections in name order, without their tokens."""
    query = select(connections).where(connections.c.tenant_id == tenant_id).order_by(connections.c.name)
    if after is not None:
        query = query.where(connections.c.name > after)
    page = [_connection_from_row(row) for row in tx.execute(query.limit(limit + 1))]
    return Page(page[:limit], page[limit - 1].name if len(page) > limit else None)


def delete_connection(tx: Transaction, tenant_id: str, name: str) -> Connection | None:
    """Delete a connection; None for an unknown one. Raises Conflict (CONNECTION_IN_USE) while a source uses it."""
    row = tx.execute(select(connections).where(_by_name(tenant_id, name)).with_for_update()).first()
    if row is None:
        return None
    users = [source.name for source in _sources_using(tx, tenant_id, name)]
    if users:
        raise Conflict(
            f"The connection {name!r} is used by {len(users)} source{'s'[: len(users) > 1]}, e.g. {users[0]}.",
            code="CONNECTION_IN_USE", existing=users[0], fix="Change or delete these sources first.",
        )  # fmt: skip
    tx.execute(delete(connections).where(_by_name(tenant_id, name)))
    return _connection_from_row(row)


def get_with_tokens(tx: Transaction, keyring: Keyring, tenant_id: str, name: str) -> tuple[Connection, Tokens]:
    """Return a connection and its decrypted tokens.

    Raises NotFound (CONNECTION_NOT_FOUND), Refused (SECRET_UNREADABLE).
    """
    row = tx.execute(select(connections).where(_by_name(tenant_id, name))).first()
    if row is None:
        raise no_such_connection(name)
    cipher = find_cipher(tx, keyring, tenant_id)
    assert cipher is not None
    return _connection_from_row(row), _tokens_from_json(
        cipher.decrypt(row.sealed, _associated_data(tenant_id, name, row.version))
    )


def acquire_renewal_lease(tx: Transaction, connection: Connection, now: datetime, duration: timedelta) -> bool:
    """Acquire the lease to renew these tokens; False while another node holds it, or if they were renewed already."""
    is_free = or_(connections.c.renewing_until.is_(None), connections.c.renewing_until <= now)
    same_version = (
        _by_name(connection.tenant_id, connection.name)
        & (connections.c.version == connection.version)
        & ~connections.c.unauthorized
    )
    return (
        tx.execute(update(connections).where(same_version, is_free).values(renewing_until=now + duration)).rowcount == 1
    )


def store_renewed_tokens(
    tx: Transaction,
    keyring: Keyring,
    connection: Connection,
    tokens: Tokens,
    expires_at: datetime | None,
    now: datetime,
) -> bool:
    """Store the tokens received for `connection`; False if its tokens were replaced meanwhile.

    The version is the fence, not the lease: the received tokens are newer than those they replace, which the provider
    may have invalidated, so they are stored even if the lease has expired.
    """
    encrypted = get_or_create_cipher(tx, keyring, connection.tenant_id, now).encrypt(
        _tokens_to_json(tokens), _associated_data(connection.tenant_id, connection.name, connection.version + 1)
    )
    same_version = _by_name(connection.tenant_id, connection.name) & (connections.c.version == connection.version)
    values: dict[str, Any] = {
        "sealed": encrypted, "version": connection.version + 1, "expires_at": expires_at, "renewed_at": now,
        "unauthorized": False, "error": None, "renewing_until": None, "updated_at": now,
    }  # fmt: skip
    stored = tx.execute(update(connections).where(same_version).values(**values)).rowcount == 1
    if stored:
        _resume_waiting(tx, connection.tenant_id, connection.name, now)
    return stored


def mark_unauthorized(tx: Transaction, connection: Connection, now: datetime) -> None:
    """Record that these tokens cannot be renewed and a user must authorize the connection again."""
    same_version = _by_name(connection.tenant_id, connection.name) & (connections.c.version == connection.version)
    values = {"unauthorized": True, "error": REAUTHORIZATION_MESSAGE, "renewing_until": None, "updated_at": now}
    tx.execute(update(connections).where(same_version).values(**values))


def record_renewal_failure(tx: Transaction, connection: Connection, error: str, not_before: datetime) -> None:
    """Record a failed renewal; no node tries again before `not_before`."""
    same_version = _by_name(connection.tenant_id, connection.name) & (connections.c.version == connection.version)
    tx.execute(update(connections).where(same_version).values(error=error[:1000], renewing_until=not_before))


def _resume_waiting(tx: Transaction, tenant_id: str, name: str, now: datetime) -> None:
    """Retry jobs that failed for lack of valid tokens immediately, instead of after their retry delay."""
    ids = [source.id for source in _sources_using(tx, tenant_id, name)]
    if not ids:
        return
    tx.notify(SOURCES)
    unauthorized = sources.c.id.in_(ids) & (sources.c.error_code == SOURCE_UNAUTHORIZED)
    tx.execute(update(sources).where(unauthorized).values(error=None, error_code=None))
    firing_jobs = select(firings.c.job_id).join(triggers, triggers.c.id == firings.c.trigger_id)
    waiting = (
        (jobs.c.kind == Kind.TRIGGER) & (jobs.c.state == JobState.PENDING) & (jobs.c.run_at > now)
        & (jobs.c.attempt > 0) & jobs.c.errors.contains(f'"{SOURCE_UNAUTHORIZED}"')
    )  # fmt: skip
    query = update(jobs).where(jobs.c.id.in_(firing_jobs.where(triggers.c.source_id.in_(ids))), waiting)
    if tx.execute(query.values(run_at=now)).rowcount:
        tx.notify(JOBS)


def _sources_using(tx: Transaction, tenant_id: str, name: str) -> list[Row[Any]]:
    rows = tx.execute(select(sources).where(sources.c.tenant_id == tenant_id).order_by(sources.c.name))
    return [row for row in rows if connection_name(orjson.loads(row.options).get("token")) == name]


def no_such_connection(name: str) -> NotFound:
    """Return the error for an unknown connection name."""
    return NotFound(
        f"There is no connection {name!r:.80}.",
        code="CONNECTION_NOT_FOUND",
        fix="List the connections: timebell connection list.",
    )


def _tokens_to_json(tokens: Tokens) -> str:
    return orjson.dumps(asdict(tokens)).decode()


def _tokens_from_json(text: str) -> Tokens:
    return Tokens(**orjson.loads(text))


def _by_name(tenant_id: str, name: str) -> Any:
    return (connections.c.tenant_id == tenant_id) & (connections.c.name == name)


def _associated_data(tenant_id: str, name: str, version: int) -> tuple[str | int, ...]:
    return tenant_id, "timebell_connections", name, "sealed", version


def _connection_from_row(row: Row[Any]) -> Connection:
    return Connection(
        tenant_id=row.tenant_id, name=row.name, token_url=row.token_url, client_id=row.client_id, version=row.version,
        expires_at=row.expires_at, renewed_at=row.renewed_at, unauthorized=row.unauthorized, error=row.error,
        renewing_until=row.renewing_until, created_at=row.created_at, created_by=row.created_by,
        updated_at=row.updated_at,
    )  # fmt: skip
