"""Identities at an identity provider, and how the claims about them become a role and a tenant."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from timebell.errors import InvalidInput
from timebell.tenancy.roles import Role
from timebell.tenancy.users import DEFAULT_TENANT

MAX_TENANT_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Person or program that a provider has authenticated, with its permissions here.

    `issuer` and `subject` together identify it forever; `name` is for people. `tenant_id` None marks a platform role.
    `expires_at` is the end of the token that proves it.
    """

    issuer: str
    subject: str
    name: str
    role: Role
    tenant_id: str | None
    expires_at: datetime


class Grant(NamedTuple):
    """A role in a tenant; `tenant_id` None: on the platform."""

    role: Role
    tenant_id: str | None


class RoleMap:
    """The roles of TIMEBELL_OIDC_ROLE_MAP: `ops=operator, "cn=erp,dc=example=editor@acme", sre=platform`.

    An entry is a value of the claim, `=` and a role, with `@` and a tenant unless it is `default`. Entries are
    separated by commas or line breaks; one that contains a comma is quoted as in CSV.

    Raises InvalidInput (INVALID_SETTING).
    """

    def __init__(self, text: str) -> None:
        self._grants: dict[str, Grant] = {}
        for entry in _split_entries(text):
            value, _, granted = entry.rpartition("=")
            role, at, tenant_id = granted.strip().partition("@")
            is_valid = (
                bool(value.strip())
                and role in list(Role)
                and (not at or (role != Role.PLATFORM and 0 < len(tenant_id) <= MAX_TENANT_LENGTH))
            )
            if not is_valid:
                raise _invalid_map(f"the invalid entry {entry!r:.100}")
            grant = Grant(Role(role), None if role == Role.PLATFORM else tenant_id or DEFAULT_TENANT)
            self._grants.setdefault(value.strip(), grant)

    def find_grant(self, values: list[str]) -> Grant | None:
        """Return the grant of the first entry whose value is among `values`; None if there is none."""
        return next((grant for value, grant in self._grants.items() if value in values), None)


def _split_entries(text: str) -> list[str]:
    try:
        parts = [part.strip() for row in csv.reader(text.splitlines(), skipinitialspace=True) for part in row]
    except csv.Error as error:
        raise _invalid_map(f"no valid list: {error}") from error
    return [part for part in parts if part]


def _invalid_map(problem: str) -> InvalidInput:
    return InvalidInput(
        f"TIMEBELL_OIDC_ROLE_MAP has {problem}.", code="INVALID_SETTING",
        fix=f"Use value=role or value=role@tenant, where role is {', '.join(Role)} (without a tenant).",
    )  # fmt: skip


def claim_values(claims: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts in a claim; empty if it is missing.

    A claim within others is named with dots (`realm_access.roles`), unless a claim has the whole name.
    """
    value: Any = claims.get(name)
    if value is None:
        value = claims
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
