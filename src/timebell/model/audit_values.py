"""Values in the audit log: what a change did to an object, without secrets and personal data, in bounded size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

MASK = "***"
NOT_RECORDED = "(not recorded)"
MAX_TEXT_CHARACTERS = 1000
MAX_STATE_BYTES = 8 * 1024
MAX_CACHED_NAME_CHARACTERS = 100
MAX_DEPTH = 8
MAX_LIST_ITEMS = 50
# Content of jobs and recipients. It may be personal data, and the audit log cannot be erased.
CONTENT_FIELDS = frozenset({
    "payload", "metadata", "result", "ownerId", "userId", "attributes", "key", "jobPayload", "recipients",
})  # fmt: skip
VOLATILE_FIELDS = frozenset({"etag", "updatedAt"})  # change with every edit
SECRET_NAME = re.compile(
    r"password|passwd|secret|token|authorization|api[-_]?key|credential|cookie|private[-_]?key|signature",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_URL_PARAMETER = re.compile(
    r"(?<=[?&])([^=&\s]*(?:password|secret|token|key|sig|auth)[^=&\s]*)=[^&#\s]*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A changed field: a JSON pointer, and its values before and after; None for a missing one."""

    field: str
    before: Any
    after: Any


def describe_change(before: Any, after: Any) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the states to record: for an edit only the changed fields, otherwise all fields that are set.

    If the two are not states of the same object, only `after` is recorded.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        if _is_same_object(before, after):
            changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            return _record({name: before.get(name) for name in changed}), _record(
                {name: after.get(name) for name in changed}
            )
        before = None
    return _record_set_fields(before), _record_set_fields(after)


def list_changes(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[FieldChange]:
    """Return the differences of two recorded states, field by field."""
    return list(_differences("", before or {}, after or {}))


def _differences(pointer: str, before: Any, after: Any) -> Iterator[FieldChange]:
    old, new = ({} if state is None else state for state in (before, after))
    if isinstance(old, Mapping) and isinstance(new, Mapping) and (old or new):
        for name in {**old, **new}:
            segment = str(name).replace("~", "~0").replace("/", "~1")
            yield from _differences(f"{pointer}/{segment}", old.get(name), new.get(name))
    elif before != after or (before == after == NOT_RECORDED):
        yield FieldChange(pointer, before, after)


def object_name(*states: Any) -> str | None:
    """Return the name or title of an object from the first of its states that has one."""
    for state in states:
        if isinstance(state, Mapping):
            name = state.get("name") or state.get("title")
            if isinstance(name, str):
                return name[:200]
    return None


def _is_same_object(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    if before.keys() == after.keys():
        return True
    identities = [(state.get("id"), state.get("name")) for state in (before, after)]
    return identities[0] == identities[1] != (None, None)


def _record_set_fields(state: Any) -> dict[str, Any] | None:
    if not isinstance(state, Mapping):
        return None
    return _record({name: value for name, value in state.items() if value not in (None, [], {})})


def _record(fields: Mapping[str, Any]) -> dict[str, Any]:
    return _limit_size(_mask_fields({name: fields[name] for name in fields if name not in VOLATILE_FIELDS}, 1))


def _mask_fields(fields: Mapping[str, Any], depth: int) -> dict[str, Any]:
    return {str(name): _mask_field(str(name), value, depth) for name, value in fields.items()}


def _mask_field(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return NOT_RECORDED if name in CONTENT_FIELDS and value is not None else value
    if name in CONTENT_FIELDS:
        return NOT_RECORDED
    if depth > 1 and isinstance(value, Mapping) and value.keys() == {"secret"}:  # the name of a secret
        return {"secret": _mask_value(value["secret"], depth + 1)}
    return MASK if _is_secret(name) else _mask_value(value, depth + 1)


def _is_secret(name: str) -> bool:
    # Clients choose some of the names, so long ones would occupy much memory.
    return _contains_secret_word(name) if len(name) <= MAX_CACHED_NAME_CHARACTERS else bool(SECRET_NAME.search(name))


@lru_cache(maxsize=1024)
def _contains_secret_word(name: str) -> bool:
    return bool(SECRET_NAME.search(name))


def _mask_value(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return NOT_RECORDED
    if isinstance(value, list | tuple):
        shown = [_mask_value(item, depth + 1) for item in value[:MAX_LIST_ITEMS]]
        return shown if len(value) <= MAX_LIST_ITEMS else [*shown, f"... {len(value) - MAX_LIST_ITEMS} more"]
    if isinstance(value, str):
        text = _URL_PARAMETER.sub(rf"\1={MASK}", _URL_PASSWORD.sub(MASK, value)) if _may_be_url(value) else value
        return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}..."
    return _mask_fields(value, depth) if isinstance(value, Mapping) else value


def _may_be_url(text: str) -> bool:
    """Return whether a text may contain a URL with a password or parameters; an instant only contains colons."""
    return ":" in text and ("://" in text or "?" in text or "&" in text)


def _limit_size(fields: dict[str, Any]) -> dict[str, Any]:
    """Keep the fields that fit into MAX_STATE_BYTES; the others are marked as not recorded."""
    if len(orjson.dumps(fields, default=str)) <= MAX_STATE_BYTES:
        return fields
    bounded, size = {}, 0
    for name, value in fields.items():
        length = len(orjson.dumps(value, default=str)) + len(name)
        size += length
        bounded[name] = value if size <= MAX_STATE_BYTES else NOT_RECORDED
        if size > MAX_STATE_BYTES:
            size -= length
    return bounded
