"""The exception hierarchy. Every error has a message and a stable code, and a fix unless the message says it.

TimebellError
├── InvalidInput (also a ValueError)     invalid argument: nothing was written
│   ├── InvalidTimezone                  INVALID_TIMEZONE
│   ├── InvalidRecurrence                INVALID_CRON, INVALID_INTERVAL, INVALID_DATES, NEVER_FIRES, ...
│   ├── InvalidInstant                   RUN_AT_WITHOUT_TIMEZONE, INVALID_RUN_AT, ...
│   │   └── InThePast                    SCHEDULE_IN_THE_PAST
│   ├── InvalidPayload                   PAYLOAD_NOT_JSON, PAYLOAD_TOO_DEEP, PAYLOAD_TOO_LARGE
│   └── RevisionMissing                  REVISION_MISSING
├── NotFound (also a LookupError)        JOB_NOT_FOUND, SCHEDULE_NOT_FOUND, ...
├── Conflict                             KEY_IN_USE, SCHEDULE_CLIENT_REQUEST_ID_IN_USE, ...
│   └── RevisionStale                    REVISION_STALE
├── Refused                              COMMAND_TARGET_OFF, PRIVATE_ADDRESS, ...
├── JobFailed                            JOB_NOT_COMPLETED
├── WaitTimeout (also a TimeoutError)    WAIT_TIMEOUT
├── SourceFailed                         SOURCE_FAILED, SOURCE_UNAUTHORIZED, SOURCE_CURSOR_LOST
│   └── SourceGone                       ORPHANED
├── ServerUnreachable                    SERVER_UNREACHABLE
├── ServerError                          SERVER_ERROR
└── StoreError
    ├── StoreUnreachable                 DATABASE_UNREACHABLE, DATABASE_READ_ONLY, DATABASE_RESTARTING, ...
    ├── SchemaOutdated                   DATABASE_NOT_UPGRADED
    └── StoreInUse                       SQLITE_IN_USE
"""

from __future__ import annotations


class TimebellError(Exception):
    """Base class. `code` is a stable UPPER_SNAKE name; `fix` is a sentence on how to resolve the error, or empty."""

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
    """An argument is invalid; nothing was written."""

    code = "INVALID_INPUT"


class InvalidTimezone(InvalidInput):
    """The name is not the exact key of an IANA time zone."""

    code = "INVALID_TIMEZONE"


class InvalidRecurrence(InvalidInput):
    """A cron expression, interval, recurrence rule or list of dates is invalid or never fires."""

    code = "INVALID_RECURRENCE"


class InvalidInstant(InvalidInput):
    """A date and time does not identify an instant."""

    code = "INVALID_RUN_AT"


class InThePast(InvalidInstant):
    """The instant is more than 5 s before the database's current time."""

    code = "SCHEDULE_IN_THE_PAST"


class InvalidPayload(InvalidInput):
    """A payload is not JSON, or exceeds a limit."""

    code = "PAYLOAD_NOT_JSON"


class NotFound(TimebellError, LookupError):
    """The object does not exist in this tenant."""

    code = "NOT_FOUND"


class Conflict(TimebellError):
    """The object exists already, or its state does not allow the action.

    `existing` is the id of the conflicting object, if any.
    """

    code = "CONFLICT"

    def __init__(self, message: str, *, code: str | None = None, fix: str = "", existing: str | None = None) -> None:
        super().__init__(message, code=code, fix=fix)
        self.existing = existing


class JobFailed(TimebellError):
    """The job that was waited for is final, but did not complete: see `app.get`."""

    code = "JOB_NOT_COMPLETED"


class WaitTimeout(TimebellError, TimeoutError):
    """The job that was waited for is not final yet; it continues."""

    code = "WAIT_TIMEOUT"


class RevisionStale(Conflict):
    """The object was edited since the given revision."""

    code = "REVISION_STALE"


class RevisionMissing(InvalidInput):
    """An edit must specify the revision on which it is based."""

    code = "REVISION_MISSING"


class Refused(TimebellError):
    """The configuration does not allow the action."""

    code = "REFUSED"


class SourceFailed(TimebellError):
    """A trigger's source cannot be read; its stored items are unchanged.

    `retry_after` is the delay in seconds requested by the source, if any.
    """

    code = "SOURCE_FAILED"

    def __init__(
        self, message: str, *, code: str | None = None, fix: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message, code=code, fix=fix)
        self.retry_after = retry_after


class SourceGone(SourceFailed):
    """The data of a source was removed, or access to it was revoked; either may be restored later."""

    code = "ORPHANED"


class ServerUnreachable(TimebellError):
    """The Timebell server does not respond. The request may or may not have been executed."""

    code = "SERVER_UNREACHABLE"


class ServerError(TimebellError):
    """The Timebell server responded with an internal error."""

    code = "SERVER_ERROR"


class StoreError(TimebellError):
    """The store cannot execute the operation."""

    code = "STORE_ERROR"


class StoreUnreachable(StoreError):
    """The database does not respond. A write in progress may or may not have been committed."""

    code = "DATABASE_UNREACHABLE"


class SchemaOutdated(StoreError):
    """The database schema does not match this version."""

    code = "DATABASE_NOT_UPGRADED"


class StoreInUse(StoreError):
    """Another engine uses this SQLite file."""

    code = "SQLITE_IN_USE"
