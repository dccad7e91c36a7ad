"""Logs on stderr: for eyes on a terminal, one JSON object a line otherwise."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from timebell.settings import Settings


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """As in logging.Formatter."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "at": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(settings: Settings) -> None:
    """Send the logs of this process to stderr as the settings say."""
    form = settings.log_format
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    if settings.log_level != "debug":
        for library in ("alembic", "asyncio", "httpx2"):
            logging.getLogger(library).setLevel(logging.WARNING)
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what fails in an answer, timebell.api logs
