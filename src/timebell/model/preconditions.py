"""Preconditions of a job's delivery: comparisons of its own fields, and a query that must return no row. Pure.

They apply in addition to those of the job's trigger, if it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from timebell.errors import InvalidInput
from timebell.model import condition as conditions
from timebell.model.condition import Comparison
from timebell.model.job import METADATA_NAMES
from timebell.model.payload import decode, encode


class UnlessQuery(NamedTuple):
    """A query that must return no row, its parameters, and the name of the source that runs it."""

    source: str
    query: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preconditions:
    """The preconditions of one job: its comparisons with the values of their fields, and a query."""

    condition: tuple[Comparison, ...]
    fields: dict[str, Any]
    unless: UnlessQuery | None = None

    @classmethod
    def for_job(cls, stored: str, payload: str, metadata: str | None) -> Preconditions:
        """Decode the preconditions stored with a job, and look up their inputs in its payload and metadata."""
        spec, job_data = decode(stored), {"payload": decode(payload), "metadata": decode(metadata) or {}}
        comparisons = conditions.parse_comparisons(spec.get("condition"))
        fields = {one.field: lookup_field(one.field, **job_data) for one in comparisons}
        if (unless := spec.get("unless")) is None:
            return cls(comparisons, fields)
        names = conditions.query_parameters(unless["query"])
        own = job_data["payload"] if isinstance(job_data["payload"], Mapping) else {}
        parameters = {name: own[name] if name in own else job_data["metadata"].get(name) for name in names}
        return cls(comparisons, fields, UnlessQuery(unless["source"], unless["query"], parameters))


def lookup_field(field: str, payload: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the value at a path such as `customer.plan` or `metadata.ownerId`; None if absent.

    A path starts in the payload, unless it begins with `payload` or `metadata`. A payload member whose name equals the
    whole path takes precedence.
    """
    if isinstance(payload, Mapping) and field in payload:
        return payload[field]
    first, *names = field.split(".")
    value: Any = payload
    if first == "metadata" and names:
        value, names = metadata, [METADATA_NAMES.get(names[0], names[0]), *names[1:]]
    elif first != "payload":
        names = [first, *names]
    for name in names:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def normalize(condition: Any, unless: Any) -> dict[str, Any]:
    """Return condition and query in their stored form, without empty ones. Raises InvalidInput (INVALID_CONDITION)."""
    comparisons = [one.to_json() for one in conditions.parse_comparisons(condition)]
    query = _normalize_unless(unless)
    return {name: value for name, value in (("condition", comparisons), ("unless", query)) if value}


def serialize(condition: Any, unless: Any) -> str | None:
    """Encode preconditions as stored with a job; None if there are none. Raises InvalidInput (INVALID_CONDITION)."""
    normalized = normalize(condition, unless)
    return encode(normalized, "condition") if normalized else None


def queried_source(stored: str | None) -> str | None:
    """Return the name of the source that runs the stored query; None without a query."""
    return None if stored is None else (decode(stored).get("unless") or {}).get("source")


def _normalize_unless(unless: Any) -> dict[str, str] | None:
    if unless is None:
        return None
    source = unless.get("source") if isinstance(unless, Mapping) and unless.keys() == {"source", "query"} else None
    if not isinstance(source, str) or not source:
        raise InvalidInput(
            f"unless is {unless!r:.60}.", code="INVALID_CONDITION",
            fix='Use {"source": "duty", "query": "SELECT 1 FROM ..."} with the name of a source of kind sql.',
        )  # fmt: skip
    return {"source": source, "query": conditions.parse_query(unless["query"] or "") or ""}
