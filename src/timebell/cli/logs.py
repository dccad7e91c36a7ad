"""Logs on stderr: for eyes on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TypeVar

from timebell import tracing
from timebell.cli.masking import Mask
from timebell.settings import Settings

T = TypeVar("T")
LONGEST = 8 * 1024  # bytes of a line
FIELDS = (
    "event", "job_id", "schedule", "topic", "tenant", "attempt", "lag_ms", "trace_id", "notification_id", "user_id",
    "cursor_from", "cursor_to", "tokens", "status", "record_ms",
)  # fmt: skip
CUT = "... (cut)"
# What can end a line, move the cursor or turn the direction of writing: C0, C1, and Unicode's own.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII: whatever somebody else wrote, no line ends and no terminal obeys it."""

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__()
        self._mask = mask or Mask()

    def format(self, record: logging.LogRecord) -> str:
        """As in logging.Formatter."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if "trace_id" not in line and (trace := tracing.trace_id()):
            line["trace_id"] = trace
        texts = {"message": self._mask(record.getMessage())}
        if record.exc_info:
            texts["exception"] = self._mask(self.formatException(record.exc_info))
        written = json.dumps(line | texts)
        room = LONGEST
        while len(written) > LONGEST and room > 64:
            room //= 2
            written = json.dumps(
                {k: _cut(v, 100) for k, v in line.items()} | {k: _cut(v, room) for k, v in texts.items()}
            )
        return written


class TextLines(logging.Formatter):
    """Lines for eyes; what could forge one is shown escaped, and what follows a first line is set in."""

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._mask = mask or Mask()

    def format(self, record: logging.LogRecord) -> str:
        """As in logging.Formatter."""
        shown = _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", self._mask(super().format(record)))
        return str(_cut(shown, LONGEST)).replace("\n", "\n    ")


def _cut(value: T, most: int) -> T | str:
    return value[: most - len(CUT)] + CUT if isinstance(value, str) and len(value) > most else value


def configure(settings: Settings) -> None:
    """Send the logs of this process to stderr as the settings say."""
    form = settings.log_format
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    mask = Mask(settings)
    handler.setFormatter(JsonLines(mask) if form == "json" else TextLines(mask))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    if settings.log_level != "debug":
        for library in ("alembic", "asyncio"):
            logging.getLogger(library).setLevel(logging.WARNING)
        # What fails in an answer, timebell.api logs, and in an alert timebell.alerts, without secrets.
        for library in ("uvicorn", "apprise"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
