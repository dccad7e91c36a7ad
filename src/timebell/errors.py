"""The exception tree. Every error says what, why and what to do, and carries a stable code.

TimebellError
├── InvalidInput (also a ValueError)     cannot be parsed, or does not fit: nothing was written
│   ├── InvalidTimezone                  INVALID_TIMEZONE
│   ├── InvalidRecurrence                INVALID_CRON, INVALID_INTERVAL, INVALID_DATES, NEVER_FIRES, ...
│   ├── InvalidInstant                   RUN_AT_WITHOUT_TIMEZONE, RUN_AT_INVALID, ...
│   │   └── InThePast                    SCHEDULE_IN_THE_PAST
│   ├── InvalidPayload                   PAYLOAD_NOT_JSON, PAYLOAD_TOO_DEEP, PAYLOAD_TOO_LARGE
│   └── RevisionMissing                  REVISION_MISSING
├── NotFound (also a LookupError)        JOB_NOT_FOUND, SCHEDULE_NOT_FOUND, ...
├── Conflict                             KEY_IN_USE, SCHEDULE_CLIENT_REQUEST_ID_IN_USE, ...
│   └── RevisionStale                    REVISION_STALE
├── Refused                              COMMAND_TARGET_OFF, PRIVATE_ADDRESS, ...
├── SourceFailed                         SOURCE_FAILED, SOURCE_UNAUTHORIZED, SOURCE_CURSOR_LOST
│   └── SourceGone                       ORPHANED
├── ServerUnreachable                    SERVER_UNREACHABLE
├── ServerError                          SERVER_ERROR
└── StoreError
    ├── StoreUnreachable                 DATABASE_UNREACHABLE
    ├── SchemaOutdated                   DATABASE_NOT_UPGRADED
    └── StoreInUse                       SQLITE_IN_USE
"""

from __future__ import annotations


class TimebellError(Exception):
    """The root. `code` is stable UPPER_SNAKE; `fix` is what to do, in a sentence."""

    code: str = "TIMEBELL_ERROR"

    def __init__(self, message: str, *, code: str | None = None, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".rstrip()


class InvalidInput(TimebellError, ValueError):
    """What was given cannot be used; nothing was written."""

    code = "INVALID_INPUT"


class InvalidTimezone(InvalidInput):
    """Not the exact key of an IANA time zone."""

    code = "INVALID_TIMEZONE"


class InvalidRecurrence(InvalidInput):
    """A cron expression, interval or list of dates that cannot be right."""

    code = "INVALID_RECURRENCE"


class InvalidInstant(InvalidInput):
    """A date and time that names no instant."""

    code = "RUN_AT_INVALID"


class InThePast(InvalidInstant):
    """More than 5 s before the database's now."""

    code = "SCHEDULE_IN_THE_PAST"


class InvalidPayload(InvalidInput):
    """A payload that is not JSON, or is over a limit."""

    code = "PAYLOAD_NOT_JSON"


class NotFound(TimebellError, LookupError):
    """No such thing in this tenant."""

    code = "NOT_FOUND"


class Conflict(TimebellError):
    """It exists already, or is not in a state that allows this. `existing` is the other one's id."""

    code = "CONFLICT"

    def __init__(self, message: str, *, code: str | None = None, fix: str = "", existing: str | None = None) -> None:
        super().__init__(message, code=code, fix=fix)
        self.existing = existing


class RevisionStale(Conflict):
    """Somebody has edited it since it was read."""

    code = "REVISION_STALE"


class RevisionMissing(InvalidInput):
    """An edit has to say of which revision."""

    code = "REVISION_MISSING"


class Refused(TimebellError):
    """Not allowed by the configuration."""

    code = "REFUSED"


class SourceFailed(TimebellError):
    """A source of a trigger cannot be read. What is known of its rows stays as it is. `retry_after`: it asks not to be
    asked for so many seconds."""

    code = "SOURCE_FAILED"

    def __init__(
        self, message: str, *, code: str | None = None, fix: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message, code=code, fix=fix)
        self.retry_after = retry_after


class SourceGone(SourceFailed):
    """What a source reads is there no more, or may not be read any more. It may come back."""

    code = "ORPHANED"


class ServerUnreachable(TimebellError):
    """The Timebell server does not answer. What was asked may or may not be done."""

    code = "SERVER_UNREACHABLE"


class ServerError(TimebellError):
    """The Timebell server answered with a fault of its own."""

    code = "SERVER_ERROR"


class StoreError(TimebellError):
    """The store cannot serve."""

    code = "STORE_ERROR"


class StoreUnreachable(StoreError):
    """The database does not answer. What was being written may or may not be there."""

    code = "DATABASE_UNREACHABLE"


class SchemaOutdated(StoreError):
    """The database's tables are not those of this version."""

    code = "DATABASE_NOT_UPGRADED"


class StoreInUse(StoreError):
    """Another engine holds this SQLite file."""

    code = "SQLITE_IN_USE"
