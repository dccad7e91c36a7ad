"""A target under a name: where jobs go, with options in which `{"secret": "name"}` stands for a secret's value."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

MASK = "***"
CUT = 8
"""Of a secret that a limit has cut off at the end of a text, so many characters are enough to be masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTarget:
    """A target as people see it. Instants are aware UTC. `signing` says until when each of its signing secrets counts
    (None: until it is rotated), the newest first; `signing_secret` is there once, when it was just made."""

    tenant_id: str
    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    revision: int = 1
    signing: tuple[datetime | None, ...] = ()
    signing_secret: str | None = field(default=None, repr=False)
    disabled_at: datetime | None = None
    disabled_reason: str | None = None
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A target as it is used for a delivery: the secrets are in its options, and in nothing that is kept or logged."""

    name: str
    kind: str
    revision: int
    options: dict[str, Any] = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    disabled: str | None = None
    """Why nothing is sent there, if so."""

    @property
    def used(self) -> dict[str, Any]:
        """What is recorded with an attempt."""
        return {"name": self.name, "kind": self.kind, "revision": self.revision}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret as it is listed; its value is shown to nobody."""

    tenant_id: str
    name: str
    version: int
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime


def secret_of(value: Any) -> str | None:
    """The name of the secret that an option stands for, if it does."""
    if isinstance(value, Mapping) and value.keys() == {"secret"} and isinstance(value["secret"], str):
        return value["secret"]
    return None


def secret_names(options: Any) -> set[str]:
    """The secrets that options refer to, however deep."""
    return set(_names(options))


def _names(value: Any) -> Iterator[str]:
    name = secret_of(value)
    if name is not None:
        yield name
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names(inner)


def filled(options: Any, values: Mapping[str, str]) -> Any:
    """Options with the values of the secrets they refer to."""
    name = secret_of(options)
    if name is not None:
        return values[name]
    if isinstance(options, Mapping):
        return {key: filled(value, values) for key, value in options.items()}
    if isinstance(options, list):
        return [filled(value, values) for value in options]
    return options


def masked(value: Any, secrets: Collection[str]) -> Any:
    """Text, or JSON with texts in it, without these secrets."""
    if not secrets or value is None:
        return value
    if isinstance(value, str):
        return _masked(value, secrets)
    if isinstance(value, Mapping):
        return {_masked(str(key), secrets): masked(inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, secrets) for inner in value]
    return value


def _masked(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
        quoted = json.dumps(secret, ensure_ascii=False)[1:-1]
        text = text.replace(quoted, MASK) if quoted != secret else text
        for length in range(len(secret) - 1, CUT - 1, -1):
            if text.endswith(secret[:length]):
                text = text[:-length] + MASK
                break
    return text
