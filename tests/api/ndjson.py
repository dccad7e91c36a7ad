"""Serializer of Schemathesis for bodies of JSON lines."""

from __future__ import annotations

import json
from typing import Any

import schemathesis

LATER = {"topic": "there", "timezone": "UTC", "runAt": "2040-01-01T00:00:00Z"}


@schemathesis.serializer("application/x-ndjson")
def serialize_lines(ctx: Any, value: Any) -> bytes:
    """Return a generated line and a valid one."""
    return f"{value}\n{json.dumps(LATER)}\n".encode(errors="replace")
