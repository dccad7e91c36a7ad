"""Errors of MariaDB and its driver: which ones are transient, and which mean that the database is unavailable."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import DBAPIError

from timebell.errors import StoreUnreachable
from timebell.store.unavailability import MARIADB_ERRORS, UNREACHABLE, Unavailability, unavailable
from timebell.store.urls import parse_database_url
from timebell.store.version import schema_outdated

# Deadlock, lock wait timeout, record changed since it was read; and a duplicate key that another transaction inserted
# between our check and our insert: when the operation is repeated, the check finds it.
TRANSIENT_ERRORS = {1213, 1205, 1020, 1062}
TOO_MANY_CONNECTIONS_ERRORS = {1040, 1203}
CLOSED_BY_SERVER_ERRORS = {2006, 2013}
_MISSING_SCHEMA_ERRORS = {1054, 1146}


class LostBeforeCommit(Exception):
    """The server closed the connection before the commit was sent, and rolled back."""

    def __init__(self, error: DBAPIError) -> None:
        super().__init__(str(error))
        self.error = error


def error_number(error: BaseException) -> int | None:
    """Return the error number of MariaDB or of its driver."""
    cause: Any = getattr(error, "orig", None) or error
    code = cause.args[0] if getattr(cause, "args", None) else None
    return code if isinstance(code, int) else None


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether an error is a lock wait timeout."""
    return error_number(error) == 1205


def classify(error: BaseException) -> Unavailability | None:
    """Return why the database is unavailable; None if it rejected a statement."""
    kind = MARIADB_ERRORS.get(error_number(error) or -1)
    if kind is not None:
        return kind
    cause = getattr(error, "orig", None) or error
    is_lost = (
        isinstance(cause, OSError) or error_number(error) == 0 or bool(getattr(error, "connection_invalidated", False))
    )
    return UNREACHABLE if is_lost else None


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the pooled connections must be replaced after an error."""
    kind = classify(error)
    return kind is not None and kind.drops_connections


def translate_error(url: str, error: Exception) -> Exception:
    """Convert a driver error to a Timebell error; return programming errors unchanged."""
    if classify(error) is not None:
        return unreachable(url, error)
    if error_number(error) in _MISSING_SCHEMA_ERRORS:
        return schema_outdated(url, None)
    return error


def unreachable(url: str, error: BaseException) -> StoreUnreachable:
    """Create the error for a database that is unavailable. It omits the password."""
    safe_url = parse_database_url(url).render_as_string(hide_password=True)
    cause = str(getattr(error, "orig", None) or error) or type(error).__name__
    return unavailable(classify(error) or UNREACHABLE, safe_url, cause)
