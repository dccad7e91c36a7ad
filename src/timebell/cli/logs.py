"""Logs on stderr: readable text on a terminal, otherwise one JSON object per line.

Masked secrets, limited lines and escaped control characters would remain our code with any logging library.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TypeVar

from timebell import tracing
from timebell.formatting import to_local
from timebell.masking import Mask
from timebell.settings import Settings
from timebell.targets.exceptions import NOT_AWAITED_FIX

T = TypeVar("T")
MAX_LINE_BYTES = 8 * 1024
RECORD_FIELDS = (
    "event", "job_id", "schedule", "topic", "tenant", "attempt", "lag_ms", "trace_id", "notification_id", "user_id",
    "cursor_from", "cursor_to", "tokens", "status", "record_ms",
)  # fmt: skip
TRUNCATION_MARK = "... (cut)"
# Characters that can end a line, control a terminal or reverse text direction: C0, C1, Unicode format characters.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


class JsonLines(logging.Formatter):
    """Format records as one ASCII JSON object per line: no message can forge a line or control a terminal."""

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__()
        self._mask = mask or Mask()

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        line |= {name: value for name in RECORD_FIELDS if (value := getattr(record, name, None)) is not None}
        if "trace_id" not in line and (trace := tracing.current_trace_id()):
            line["trace_id"] = trace
        texts = {"message": self._mask(record.getMessage())}
        if record.exc_info:
            texts["exception"] = self._mask(self.formatException(record.exc_info))
        written = json.dumps(line | texts)
        max_length = MAX_LINE_BYTES
        while len(written) > MAX_LINE_BYTES and max_length > 64:
            max_length //= 2  # escapes can make the JSON longer than the texts, so try smaller ones until it fits
            written = json.dumps(
                {k: _truncate(v, 100) for k, v in line.items()}
                | {k: _truncate(v, max_length) for k, v in texts.items()}
            )
        return written


class TextLines(logging.Formatter):
    """Format records as text with the time in a zone, UTC unless changed.

    Control characters are escaped and continuation lines indented, so none can be forged.
    """

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__("%(levelname)-7s %(message)s")
        self._mask = mask or Mask()
        self.timezone = "UTC"

    def format(self, record: logging.LogRecord) -> str:
        at = to_local(datetime.fromtimestamp(record.created, UTC), self.timezone)
        line = f"{at:%H:%M:%S %Z} {self._mask(super().format(record))}"
        text = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
        return str(_truncate(text, MAX_LINE_BYTES)).replace("\n", "\n    ")


def _truncate(value: T, max_length: int) -> T | str:
    return (
        value[: max_length - len(TRUNCATION_MARK)] + TRUNCATION_MARK
        if isinstance(value, str) and len(value) > max_length
        else value
    )


def use_timezone(timezone: str | None) -> None:
    """Show the times of text lines in the default time zone of an app, if it has one."""
    for handler in logging.getLogger().handlers:
        if timezone is not None and isinstance(handler.formatter, TextLines):
            handler.formatter.timezone = timezone


def _explain_unawaited_call(record: logging.LogRecord) -> bool:
    """Add the fix to Python's warning about a call without `await`."""
    text = record.getMessage()
    if "was never awaited" in text:
        record.msg, record.args = f"{text.rstrip()}\nNOT_AWAITED: {NOT_AWAITED_FIX}", ()
    return True


def configure_logging(settings: Settings) -> None:
    """Configure logging of this process, and of Python's warnings, to stderr.

    The format and level are those of the settings.
    """
    form = settings.log_format
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    mask = Mask(settings)
    handler.setFormatter(JsonLines(mask) if form == "json" else TextLines(mask))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addFilter(_explain_unawaited_call)
    if settings.log_level != "debug":
        for library in ("alembic", "asyncio"):
            logging.getLogger(library).setLevel(logging.WARNING)
        # timebell.api and timebell.alerts log the same failures without secrets.
        for library in ("uvicorn", "apprise"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
