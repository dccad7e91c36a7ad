"""Errors of PostgreSQL and its driver: which ones are transient, and which mean that the database is unavailable."""

from __future__ import annotations

import asyncpg

from timebell.errors import StoreUnreachable
from timebell.store.unavailability import POSTGRES_STATES, READ_ONLY, UNREACHABLE, Unavailability, unavailable
from timebell.store.urls import parse_database_url

# Serialization failure, deadlock, lock not available; and a duplicate key that another transaction inserted between our
# check and our insert: when the operation is repeated, the check finds it.
TRANSIENT_STATES = {"40001", "40P01", "55P03", "23505"}
CONNECTION_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,
)


class LostBeforeCommit(Exception):
    """The connection was lost before the commit was sent, so the server has rolled back, or will."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def is_stale_statement(error: BaseException) -> bool:
    """Return whether an error is due to a statement that was prepared before a migration changed the tables."""
    return "InvalidCachedStatement" in type(getattr(error, "orig", None) or error).__name__


def classify(error: BaseException) -> Unavailability | None:
    """Return why the database is unavailable; None if it rejected a statement."""
    cause = getattr(error, "orig", None) or error
    cause = getattr(cause, "__cause__", None) or cause
    state = getattr(error, "sqlstate", None) or getattr(cause, "sqlstate", None) or ""
    if state in POSTGRES_STATES:
        return POSTGRES_STATES[state]
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return READ_ONLY
    is_lost = (
        isinstance(error, CONNECTION_ERRORS)  # checked first: the cause of a timeout is a cancellation
        or isinstance(cause, CONNECTION_ERRORS)
        or bool(getattr(error, "connection_invalidated", False))
    )
    return UNREACHABLE if is_lost else None


def unreachable(url: str, error: BaseException) -> StoreUnreachable:
    """Create the error for a database that is unavailable. It omits the password."""
    safe_url = parse_database_url(url).render_as_string(hide_password=True)
    cause = str(getattr(error, "orig", None) or error) or type(error).__name__
    return unavailable(classify(error) or UNREACHABLE, safe_url, cause)
