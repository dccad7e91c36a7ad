"""Describe the exception of a handler: one line for lists, and a bounded traceback."""

from __future__ import annotations

from pathlib import Path
from traceback import TracebackException

from timebell.targets.base import Outcome

MAX_FRAMES = 40
"""Frames per exception, the innermost ones."""
MAX_TRACEBACK_LENGTH = 8_000
_PACKAGE = Path(__file__).parents[1]
_CALLERS = {
    str(_PACKAGE / file) for file in ("targets/handler.py", "targets/event_loop_watch.py", "engine/fast_path.py")
}


def failed_outcome(exc: BaseException, *, retryable: bool) -> Outcome:
    """Return the outcome of a handler that raised `exc`."""
    outcome = Outcome.failed(type(exc).__name__, _describe(exc), retryable=retryable)
    outcome.traceback = format_traceback(exc)
    return outcome


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
