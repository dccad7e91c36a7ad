"""Group errors by their normalized message: the text without the parts that differ between equal failures."""

from __future__ import annotations

import re
from hashlib import sha256

MAX_COMPARED_LENGTH = 300
# The location that handlers' errors end with; ids, addresses and numbers; quoted text.
_LOCATION = re.compile(r" \([^()\s]+:\d+ in [^()]+\)$")
_VARIABLE = re.compile(
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b0x[0-9a-f]+\b|\b[0-9a-f]{16,}\b|\d+|'[^']*'|\"[^\"]*\"",
    re.IGNORECASE,
)


def normalize_error(error: str) -> str:
    """Return the first line without location, ids, numbers and quoted text, each replaced by `#`."""
    first_line = error.strip().split("\n", 1)[0]
    return _VARIABLE.sub("#", _LOCATION.sub("", first_line))[:MAX_COMPARED_LENGTH]


def error_group(error: str | None) -> str:
    """Return the id of the group of an error: 16 hexadecimal digits."""
    return sha256(normalize_error(error or "").encode(errors="replace")).hexdigest()[:16]
