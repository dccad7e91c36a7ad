"""Which errors of a database mean that it is unavailable, as opposed to a rejected statement.

An unavailable database is a normal event: results are kept and written later, requests are answered with 503, and
loops try again until it is available.
"""

from __future__ import annotations

from dataclasses import dataclass

from timebell.errors import StoreUnreachable


@dataclass(frozen=True, slots=True)
class Unavailability:
    """Why a database is unavailable, with the code of the error.

    `drops_connections`: all connections are replaced, because a new one may lead to another server.
    """

    code: str
    description: str
    fix: str
    drops_connections: bool = False


UNREACHABLE = Unavailability(
    code="DATABASE_UNREACHABLE", description="does not answer",
    fix="Check that it is running, and check TIMEBELL_DATABASE_URL.", drops_connections=True,
)  # fmt: skip
REFUSED = Unavailability(
    code="DATABASE_UNREACHABLE", description="refuses the connection",
    fix="Check the user, the password and the name of the database in TIMEBELL_DATABASE_URL, and that they exist.",
    drops_connections=True,
)  # fmt: skip
READ_ONLY = Unavailability(
    code="DATABASE_READ_ONLY", description="accepts no writes",
    fix="Connect to the primary, and check its disk.", drops_connections=True,
)  # fmt: skip
RESTARTING = Unavailability(
    code="DATABASE_RESTARTING", description="is starting or stopping",
    fix="Wait until it has started.", drops_connections=True,
)  # fmt: skip
EXHAUSTED = Unavailability(
    code="DATABASE_EXHAUSTED", description="has no connections, disk or memory left",
    fix="Check its limit of connections, its disk and its memory.",
)  # fmt: skip
BUSY = Unavailability(
    code="DATABASE_BUSY", description="ended the statement, because it conflicted with others or took too long",
    fix="Try again, and look for long transactions.",
)  # fmt: skip
BY_CODE = {kind.code: kind for kind in (UNREACHABLE, READ_ONLY, RESTARTING, EXHAUSTED, BUSY)}

POSTGRES_STATES = {
    "08000": UNREACHABLE,  # connection exception
    "08001": UNREACHABLE,  # the client could not connect
    "08003": UNREACHABLE,  # connection does not exist
    "08004": UNREACHABLE,  # the server refused the connection
    "08006": UNREACHABLE,  # connection failure
    "08007": UNREACHABLE,  # transaction resolution unknown
    "08P01": UNREACHABLE,  # protocol violation: all errors of PgBouncer
    "25006": READ_ONLY,  # a standby, or default_transaction_read_only
    "25P03": UNREACHABLE,  # idle in transaction for too long: this process was frozen
    "28000": REFUSED,  # invalid authorization: a role that does not exist (yet)
    "28P01": REFUSED,  # wrong password
    "3D000": REFUSED,  # the database does not exist (yet)
    "40001": BUSY,  # serialization failure, after several attempts
    "40P01": BUSY,  # deadlock, after several attempts
    "53000": EXHAUSTED,  # insufficient resources
    "53100": EXHAUSTED,  # disk full
    "53200": EXHAUSTED,  # out of memory
    "53300": EXHAUSTED,  # too many connections
    "53400": EXHAUSTED,  # configured limit exceeded
    "55P03": BUSY,  # lock not available, after several attempts
    "57014": BUSY,  # query cancelled: statement_timeout, or an administrator
    "57P01": RESTARTING,  # shutdown by an administrator
    "57P02": RESTARTING,  # crash of another server process
    "57P03": RESTARTING,  # cannot connect now: starting, stopping or recovering
    "57P04": UNREACHABLE,  # the database was dropped
    "57P05": UNREACHABLE,  # idle session timeout
    "58030": EXHAUSTED,  # I/O error
}
"""By SQLSTATE (PostgreSQL manual, appendix A)."""

MARIADB_ERRORS = {
    0: UNREACHABLE,  # of the driver: the connection is closed
    1020: BUSY,  # record changed since it was read, after several attempts
    1021: EXHAUSTED,  # disk full
    1026: EXHAUSTED,  # cannot write to a file
    1037: EXHAUSTED,  # out of memory
    1038: EXHAUSTED,  # out of sort memory
    1040: EXHAUSTED,  # too many connections
    1041: EXHAUSTED,  # out of resources
    1044: REFUSED,  # access to the database denied
    1045: REFUSED,  # access denied
    1047: RESTARTING,  # Galera: this node has not joined, or has lost, its cluster
    1049: REFUSED,  # unknown database
    1053: RESTARTING,  # shutdown in progress
    1077: RESTARTING,  # normal shutdown
    1079: RESTARTING,  # shutdown complete
    1114: EXHAUSTED,  # table full
    1152: UNREACHABLE,  # aborted connection
    1180: RESTARTING,  # Galera: a commit failed, because this node has lost its cluster
    1203: EXHAUSTED,  # too many connections of this user
    1205: BUSY,  # lock wait timeout, after several attempts
    1213: BUSY,  # deadlock, after several attempts
    1226: EXHAUSTED,  # a limit of this user
    1290: READ_ONLY,  # read_only
    1317: BUSY,  # query interrupted
    1698: REFUSED,  # access denied: the account requires a Unix socket
    1792: READ_ONLY,  # a read-only transaction
    1927: UNREACHABLE,  # connection killed
    1969: BUSY,  # max_statement_time exceeded
    4031: UNREACHABLE,  # disconnected because of inactivity
    **dict.fromkeys(range(2000, 2062), UNREACHABLE),  # of the driver (client errors)
}
"""By error number (MariaDB knowledge base, "MariaDB Error Codes")."""


def unavailable(kind: Unavailability, safe_url: str, cause: str) -> StoreUnreachable:
    """Create the error of a database; `safe_url` contains no password."""
    return StoreUnreachable(f"The database {safe_url} {kind.description}: {cause}.", code=kind.code, fix=kind.fix)
