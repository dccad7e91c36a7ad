"""Describe the exception of a handler: one line for lists, and a bounded traceback."""

from __future__ import annotations

from pathlib import Path
from traceback import TracebackException

from timebell.targets.base import Outcome

MAX_FRAMES = 40
"""Frames per exception, the innermost ones."""
MAX_TRACEBACK_LENGTH = 8_000
_CALLERS = {
    str(Path(__file__).parents[1] / name)
    for name in (
        "targets/handler.py",
        "targets/event_loop_watch.py",
        "targets/process_worker.py",
        "engine/fast_path.py",
    )
}
"""The modules that call handlers."""
NOT_AWAITED_FIX = (
    "A call was not awaited, so it did nothing. Write await app.schedule_at(...), or app.sync.schedule_at(...) in a "
    "plain function."
)
_DESCRIPTION = "_timebell_description"


class ProcessDied(Exception):
    """The worker process of a call could not be started, crashed or was killed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        attach_description(self, code="PROCESS_DIED", error=message, traceback=None)


def failed_outcome(exc: BaseException, *, retryable: bool) -> Outcome:
    """Return the outcome of a handler that raised `exc`."""
    description = vars(exc).get(_DESCRIPTION)
    code, error, traceback = description or (type(exc).__name__, _describe(exc), format_traceback(exc))
    outcome = Outcome.failed(code, error, retryable=retryable)
    if description is None and isinstance(exc, AttributeError | TypeError) and "'coroutine' object" in str(exc):
        outcome = Outcome.failed("NOT_AWAITED", f"{error} {NOT_AWAITED_FIX}", retryable=retryable)
    outcome.traceback = traceback
    return outcome


def attach_description(exc: BaseException, code: str | None, error: str | None, traceback: str | None) -> None:
    """Attach code, error and traceback to an exception; they replace its own in `failed_outcome`."""
    vars(exc)[_DESCRIPTION] = code, error, traceback


def format_traceback(exc: BaseException) -> str:
    """Return the traceback with its causes, from the handler's first frame, and without local variables.

    If it is longer than MAX_TRACEBACK_LENGTH characters, its middle is omitted.
    """
    trace = first = exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in _CALLERS and trace.tb_next is not None:
            first = trace.tb_next
        trace = trace.tb_next
    text = "".join(TracebackException(type(exc), exc, first, limit=-MAX_FRAMES).format())
    if len(text) > MAX_TRACEBACK_LENGTH:
        head = MAX_TRACEBACK_LENGTH // 4
        text = f"{text[:head]}\n...\n{text[head + 5 - MAX_TRACEBACK_LENGTH :]}"
    return text


def _describe(exc: BaseException) -> str:
    """Format an exception as one line: type, message and location."""
    location = ""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        code = trace.tb_frame.f_code
        location = f" ({code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name})"
    return f"{type(exc).__name__}: {exc}"[:2000].replace("\x00", "") + location
