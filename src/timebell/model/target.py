"""Named targets, whose options may contain `{"secret": "name"}` in place of a secret's value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, quote, quote_plus, urlsplit

from timebell.errors import InvalidInput
from timebell.model.limits import Limits

MASK = "***"
CONFIDENTIAL_HTTP_OPTIONS = (
    ("auth", "token"), ("auth", "password"), ("auth", "clientSecret"), ("auth", "credentials"), ("tls", "key"),
    ("proxy", "password"),
)  # fmt: skip
"""Options of the kind `http` that have to refer to a secret."""
MIN_TRUNCATED_SECRET_LENGTH = 8
"""A secret that is truncated at the end of a text is masked if at least this many characters are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTarget:
    """A named target as returned to callers, with references instead of secrets. Instants are aware UTC.

    `signing_valid_until` has the expiry of each signing secret, newest first (None: until it is rotated).
    `signing_secret` is set only in the response to its creation.
    """

    tenant_id: str
    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    revision: int = 1
    signing_valid_until: tuple[datetime | None, ...] = ()
    signing_secret: str | None = field(default=None, repr=False)
    disabled_at: datetime | None = None
    disabled_reason: str | None = None
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTarget:
    """A named target with the values of its secrets, used for a delivery; never stored or logged."""

    name: str
    kind: str
    revision: int
    options: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    disabled_reason: str | None = None
    """The reason why deliveries are disabled, if they are."""

    @property
    def summary(self) -> dict[str, Any]:
        """The part that is recorded with an attempt."""
        return {"name": self.name, "kind": self.kind, "revision": self.revision}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret without its value, which is never returned."""

    tenant_id: str
    name: str
    version: int
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime


def referenced_secret(value: Any) -> str | None:
    """Return the name in a `{"secret": "name"}` option; None for any other value."""
    if isinstance(value, Mapping) and value.keys() == {"secret"} and isinstance(value["secret"], str):
        return value["secret"]
    return None


def require_secret_references(options: Mapping[str, Any]) -> None:
    """Check that the confidential options of a named http target refer to secrets. Raises InvalidInput."""
    for group, name in CONFIDENTIAL_HTTP_OPTIONS:
        members = options.get(group)
        value = members.get(name, "") if isinstance(members, Mapping) else ""
        if value != "" and referenced_secret(value) is None:
            raise InvalidInput(
                f"{group}.{name} has to refer to a secret.", code="SECRET_REQUIRED",
                fix='Store the value with timebell secret set NAME, then use {"secret": "NAME"}.',
            )  # fmt: skip


def target_limits(options: Mapping[str, Any]) -> Limits | None:
    """Return the limits of an http target; None if it has none. Raises InvalidInput (INVALID_CONCURRENCY, ...)."""
    if options.get("concurrency") is None and options.get("rate") is None:
        return None
    return Limits.parse(options.get("concurrency"), options.get("rate"), options.get("perSeconds", 1.0), None)


def secret_names(options: Any) -> set[str]:
    """Return the names of the secrets that options refer to, at any depth."""
    return set(_iter_secret_names(options))


def _iter_secret_names(value: Any) -> Iterator[str]:
    name = referenced_secret(value)
    if name is not None:
        yield name
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _iter_secret_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_secret_names(inner)


def fill_secrets(options: Any, values: Mapping[str, str]) -> Any:
    """Return options with secret references replaced by `values`. Raises KeyError for a missing secret."""
    name = referenced_secret(options)
    if name is not None:
        return values[name]
    if isinstance(options, Mapping):
        return {key: fill_secrets(value, values) for key, value in options.items()}
    if isinstance(options, list):
        return [fill_secrets(value, values) for value in options]
    return options


def mask_secrets(value: Any, secrets: Collection[str]) -> Any:
    """Return a string or JSON value with all occurrences of these secrets replaced by MASK."""
    if not secrets:
        return value
    if isinstance(value, str):
        return _mask_text(value, secrets)
    if isinstance(value, Mapping):
        return {_mask_text(str(key), secrets): mask_secrets(inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(inner, secrets) for inner in value]
    return value


def _mask_text(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
        # In JSON, and in URLs and forms.
        for quoted in {json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe=""), quote_plus(secret)}:
            text = text.replace(quoted, MASK) if quoted != secret else text
        for length in range(len(secret) - 1, MIN_TRUNCATED_SECRET_LENGTH - 1, -1):
            if text.endswith(secret[:length]):
                text = text[:-length] + MASK
                break
    return text


def has_password(url: str) -> bool:
    """Return whether a URL contains a password, before the host or as a query parameter.

    Raises ValueError for an invalid URL.
    """
    parts = urlsplit(url)
    return bool(parts.password) or not {"password", "passwd"}.isdisjoint(parse_qs(parts.query))
