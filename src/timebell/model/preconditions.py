"""What a job or schedule asks before it is delivered, beside its trigger if it has one: comparisons of what it carries,
and a query to a source that speaks against it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from timebell.errors import InvalidInput
from timebell.model import condition as conditions
from timebell.model.condition import Comparison
from timebell.model.payload import decode, encode

SPELT = {
    "ownerId": "owner_id", "tenantId": "tenant_id", "correlationId": "correlation_id",
    "clientRequestId": "client_request_id",
}  # fmt: skip
"""Labels as JSON has them -> as the metadata does."""


class Unless(NamedTuple):
    """A query that must find nothing, with what it names, and the source that it is put to."""

    source: str
    query: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gated:
    """What one job asks: its comparisons, and the fields that these are of; and a query."""

    condition: tuple[Comparison, ...]
    fields: dict[str, Any]
    unless: Unless | None = None

    @classmethod
    def of(cls, kept: str, payload: str, metadata: str | None) -> Gated:
        """Of what is kept with a job, and what it carries."""
        said, carried = decode(kept), {"payload": decode(payload), "metadata": decode(metadata) or {}}
        compared = conditions.read(said.get("condition"))
        fields = {one.field: look_up(one.field, **carried) for one in compared}
        if (unless := said.get("unless")) is None:
            return cls(compared, fields)
        named = conditions.parameters_of(unless["query"])
        own = carried["payload"] if isinstance(carried["payload"], Mapping) else {}
        given = {name: own[name] if name in own else carried["metadata"].get(name) for name in named}
        return cls(compared, fields, Unless(unless["source"], unless["query"], given))


def look_up(field: str, payload: Any, metadata: Mapping[str, Any]) -> Any:
    """What a job carries under a name: of its payload, `payload.customer.plan` or `metadata.ownerId`; null if nothing.

    A name that the payload itself has is that one.
    """
    if isinstance(payload, Mapping) and field in payload:
        return payload[field]
    first, *names = field.split(".")
    found: Any = payload
    if first == "metadata" and names:
        found, names = metadata, [SPELT.get(names[0], names[0]), *names[1:]]
    elif first != "payload":
        names = [first, *names]
    for name in names:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def read(condition: Any, unless: Any) -> dict[str, Any]:
    """Both as they are kept, what is empty left out. Raises InvalidInput (INVALID_CONDITION)."""
    compared, asked = [one.to_json() for one in conditions.read(condition)], _unless(unless)
    return {name: value for name, value in (("condition", compared), ("unless", asked)) if value}


def kept(condition: Any, unless: Any) -> str | None:
    """As JSON to be kept with a job; None: it asks nothing. Raises InvalidInput (INVALID_CONDITION)."""
    said = read(condition, unless)
    return encode(said, "condition") if said else None


def source_of(kept: str | None) -> str | None:
    """The name of the source that is asked, if one is."""
    return None if kept is None else (decode(kept).get("unless") or {}).get("source")


def _unless(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    source = given.get("source") if isinstance(given, Mapping) and given.keys() == {"source", "query"} else None
    if not isinstance(source, str) or not source:
        raise InvalidInput(
            f"unless is {given!r:.60}.", code="INVALID_CONDITION",
            fix='Give {"source": "duty", "query": "SELECT 1 FROM ..."}: a source of kind sql, and what to ask it.',
        )  # fmt: skip
    return {"source": source, "query": conditions.query(given["query"] or "") or ""}
