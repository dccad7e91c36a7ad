"""Devices in CSV and NDJSON files: the columns of a header, records, and their values. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import orjson

from timebell.errors import InvalidInput

Line = tuple[int, bytes]
FIELD_NAMES = {
    "userId": "user_id", "platform": "platform", "gender": "gender", "age": "age", "birthDate": "birth_date",
    "language": "language", "timezone": "timezone", "pushOnOff": "push_on",
    "marketingOnOff": "marketing_on", "topics": "topics", "attributes": "attributes",
}  # fmt: skip
"""Names of the fields in JSON and CSV, and in Python."""
ATTRIBUTE_PREFIX = "attributes."
MAX_RECORD_LINES = 100
"""Physical lines of one CSV record; more means that a closing quote is missing."""
MIN_SIMILARITY = 0.8
MAX_EXACT_DIGITS = 15
"""Digits of a number that a float represents exactly."""

# Headers that mean a field, without case and punctuation: those of the API, of Python, and of audience queries.
_ALIASES = {
    "token": "token", "userid": "userId", "platform": "platform", "gender": "gender", "age": "age",
    "birthdate": "birthDate", "dateofbirth": "birthDate", "birthday": "birthDate",
    "language": "language", "timezone": "timezone", "pushonoff": "pushOnOff", "pushon": "pushOnOff",
    "marketingonoff": "marketingOnOff", "marketingon": "marketingOnOff", "topics": "topics",
}  # fmt: skip
_BOOLEANS = {"true": True, "false": False, "y": True, "n": False, "yes": True, "no": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True)
class Column:
    """A CSV column: a field of a device, or (`is_attribute`) an attribute whose values `parse` converts."""

    name: str
    is_attribute: bool
    parse: Callable[[str], Any]


def parse_header(header: bytes) -> list[Column]:
    """Return the columns of a CSV header line.

    A column named like a field, with any case, spaces, `_` or `-`, is that field. Any other column is an attribute; its
    values are texts, unless the name ends in `:number` or `:boolean`. Raises InvalidInput (INVALID_DEVICE) for a name
    that resembles a field, because a consent must not be lost by a typing error; `attributes.` before the name says
    that it is an attribute.
    """
    columns = [_parse_column(name.strip()) for name in parse_row(header)]
    names = [(column.is_attribute, column.name) for column in columns if column.name]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise _invalid(f"The column {repeated[0][1]!r:.60} occurs twice", "Remove one of them.")
    if (False, "token") not in names:
        fix = "The first line has the names of the columns, with commas between them."
        raise _invalid("There is no column `token`", fix)
    return columns


def _parse_column(name: str) -> Column:
    name, _, kind = name.partition(":")
    if kind and kind not in _CONVERTERS:
        raise _invalid(f"The column {name!r:.60} has the type {kind!r:.20}", f"Use one of {', '.join(_CONVERTERS)}.")
    name, is_attribute = resolve_column(name)
    convert = _CONVERTERS[kind or "text"] if is_attribute else _FIELD_CONVERTERS.get(name, str)
    return Column(name, is_attribute, convert)


def resolve_column(name: str) -> tuple[str, bool]:
    """Return the field, or the attribute, that a column means, and whether it is an attribute.

    Raises InvalidInput (INVALID_DEVICE) for a name that resembles a field; see `parse_header`.
    """
    if name.startswith(ATTRIBUTE_PREFIX):
        return name.removeprefix(ATTRIBUTE_PREFIX), True
    plain = "".join(character for character in name.lower() if character.isalnum())
    if plain in _ALIASES:
        return _ALIASES[plain], False
    if near := get_close_matches(plain, _ALIASES, 1, MIN_SIMILARITY):
        raise _invalid(
            f"The column {name!r:.60} is not a field of a device",
            f"Did you mean {_ALIASES[near[0]]}? If it is an attribute, name it {ATTRIBUTE_PREFIX}{name:.60}.",
        )
    return name, True


class RecordReader:
    """Joins the lines of a CSV file into records, because a quoted cell may contain line breaks (RFC 4180)."""

    def __init__(self) -> None:
        self._open: list[Line] = []

    def read(self, lines: Sequence[Line]) -> Iterator[Line]:
        """Yield the records that these lines complete, each with the number of its first line."""
        for line in lines:
            if not self._open and b'"' not in line[1]:
                yield line
                continue
            self._open.append(line)
            if sum(text.count(b'"') for _, text in self._open) % 2 == 0:
                yield self._open[0][0], b"\n".join(text for _, text in self._open)
                self._open = []
            elif len(self._open) >= MAX_RECORD_LINES:
                yield from self.finish()

    def finish(self) -> Iterator[Line]:
        """Yield the lines of a record whose closing quote is missing, as records of their own; the first is invalid."""
        unread, self._open = self._open, []
        yield from unread


def parse_csv_record(text: bytes, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the JSON fields of a CSV record. Empty cells are skipped. Raises InvalidInput (INVALID_DEVICE)."""
    cells = parse_row(text)
    if len(cells) > len(columns):
        raise _invalid(
            f"The line has {len(cells)} cells, the header {len(columns)}", "Put cells with commas in quotes."
        )
    fields: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for column, cell in zip(columns, cells, strict=False):  # cells at the end may be missing
        if not cell or not column.name:
            continue
        try:
            value = column.parse(cell)
        except ValueError:
            kind = column.parse.__name__.removeprefix("_parse_")
            raise _invalid(f"{column.name:.60} is {cell!r:.60}, not a {kind}", "See the type in the header.") from None
        if column.is_attribute:
            attributes[column.name] = value
        else:
            fields[column.name] = value
    if attributes:
        fields["attributes"] = attributes
    return fields


def parse_json_record(text: bytes) -> dict[str, Any]:
    """Return the JSON fields of an NDJSON line. Raises InvalidInput (INVALID_DEVICE)."""
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise _invalid("The line is not a JSON object", 'Use e.g. {"token": "...", "userId": ...}.')
    return parsed


def rename_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON fields of a device under their Python names."""
    renamed = {FIELD_NAMES.get(name, name): value for name, value in fields.items()}
    if renamed.get("push_on", True) is None:
        del renamed["push_on"]
    return renamed


def parse_row(text: bytes) -> list[str]:
    """Split a CSV record into cells. Raises InvalidInput (INVALID_DEVICE)."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        raise _invalid("The line is not in UTF-8", "Save the file as UTF-8; in Excel, as “CSV UTF-8”.") from None
    if not (b'"' in text or b"\r" in text or b"\n" in text):  # much faster than a csv.reader per record
        return decoded.split(",") if decoded else []
    try:
        rows = list(csv.reader(io.StringIO(decoded, newline=""), strict=True))
        if len(rows) > 1:
            raise csv.Error("a line break outside quotes")
    except csv.Error as error:
        raise _invalid(f"The line is not valid CSV: {error}", "End lines with a line feed; see RFC 4180.") from error
    return rows[0] if rows else []


def _parse_text(cell: str) -> str:
    return cell


def _parse_number(cell: str) -> float:
    if cell.isdecimal() and len(cell) <= MAX_EXACT_DIGITS:
        return int(cell)
    number = float(cell)
    if not -1e15 < number < 1e15:  # infinite, or not exact
        raise ValueError
    return int(number) if number.is_integer() else number


def _parse_boolean(cell: str) -> bool:
    value = _BOOLEANS.get(cell.lower())
    if value is None:
        raise ValueError
    return value


def _parse_age(cell: str) -> Any:
    return int(cell[:6]) if cell.isdecimal() else cell


def _invalid(problem: str, fix: str) -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_DEVICE", fix=fix)


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "text": _parse_text, "number": _parse_number, "boolean": _parse_boolean,
}  # fmt: skip
_FIELD_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "age": _parse_age, "topics": str.split, "pushOnOff": _parse_boolean, "marketingOnOff": _parse_boolean,
}  # fmt: skip
