"""CSV files for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

# A spreadsheet interprets text with these prefixes as a formula; the last four are full-width characters.
FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def encode_rows(rows: Sequence[Sequence[Any]]) -> bytes:
    """Encode rows as CSV; text that a spreadsheet would evaluate is escaped."""
    output = io.StringIO()
    csv.writer(output).writerows([escape_cell(value) for value in row] for row in rows)
    return output.getvalue().encode()


def escape_cell(value: Any) -> Any:
    """Convert a value to a CSV cell; text that a spreadsheet would evaluate is prefixed with an apostrophe."""
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text.startswith(FORMULA_PREFIXES) else text
