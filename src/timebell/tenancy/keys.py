"""API keys: `tb_live_<id>_<secret><checksum>`.

The id finds the row, the secret is 192 bits from the operating system, the checksum (CRC-32) tells a key from
a look-alike without asking anyone. Stored is an HMAC-SHA-256 of the whole key under the installation's secret key,
so that a stolen database opens nothing; what was chosen by chance needs no slow hash.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from timebell.errors import InvalidInput, Refused
from timebell.tenancy.roles import Role

ENVIRONMENT = "live"
# What a key can be limited to: the first part of a path under /api/v1.
SCOPES = (
    "schedules", "jobs", "dead-letters", "operations", "calendars", "nodes", "events", "audit", "audit-log", "forecast",
    "backlogs", "tenants", "keys", "queues", "pause-all", "resume-all", "targets", "secrets",
    "connections", "sources", "hooks", "triggers",
    "devices", "audiences", "campaigns",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as it is kept; its secret is not. `tenant_id` None: of the platform. Instants are aware UTC."""

    id: str
    tenant_id: str | None
    name: str
    role: Role
    scopes: tuple[str, ...] | None = None
    networks: tuple[str, ...] | None = None
    created_at: datetime
    created_by: str | None = None
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None

    def usable(self, now: datetime, address: str | None) -> bool:
        """Whether it opens anything now, from this address."""
        if self.revoked_at is not None or (self.expires_at is not None and self.expires_at <= now):
            return False
        return self.networks is None or _within(address, self.networks)

    def permits(self, scope: str) -> bool:
        """Whether it may be used for this part of the API."""
        return self.scopes is None or scope in self.scopes


def mint() -> tuple[str, str]:
    """A new key's id, and its whole text, which is shown once."""
    id_ = secrets.token_hex(6)
    text = f"tb_{ENVIRONMENT}_{id_}_{secrets.token_hex(24)}"
    return id_, text + _checksum(text)


def id_of(text: str) -> str | None:
    """The id in a key's text; None for what cannot be a key."""
    parts = text.split("_") if text.isascii() and len(text) < 200 else []
    if len(parts) != 4 or parts[0] != "tb" or not parts[2] or _checksum(text[:-8]) != text[-8:]:
        return None
    return parts[2]


def peppers(secret_key: str | None) -> list[str]:
    """The secret keys of an installation, the newest first: while one is rotated there are two, with a comma."""
    return [one for one in (each.strip() for each in (secret_key or "").split(",")) if one]


def digests(secret_key: str | None, text: str) -> list[str]:
    """What may be stored of a key: under the newest secret key, and under those before it."""
    return [hmac.new(one.encode(), text.encode(), sha256).hexdigest() for one in peppers(secret_key)]


def digest(secret_key: str | None, text: str) -> str:
    """What is stored of a key. Raises Refused (SECRET_KEY_MISSING)."""
    found = digests(secret_key, text)
    if not found:
        raise Refused(
            "API keys need a secret key of this installation, and none is set.", code="SECRET_KEY_MISSING",
            fix="Set TIMEBELL_SECRET_KEY on every node: python -c 'import secrets; print(secrets.token_hex(32))'",
        )  # fmt: skip
    return found[0]


def matches(stored: str, given: str) -> bool:
    """Whether two digests are the same, in constant time."""
    return hmac.compare_digest(stored, given)


def check_networks(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Networks in CIDR notation. Raises InvalidInput (INVALID_NETWORKS)."""
    if given is None:
        return None
    try:
        return tuple(str(ipaddress.ip_network(one)) for one in given)
    except ValueError as bad:
        raise InvalidInput(f"{bad}.", code="INVALID_NETWORKS", fix='Give networks such as "192.0.2.0/24".') from bad


def check_scopes(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Parts of the API. Raises InvalidInput (INVALID_SCOPES)."""
    unknown = [one for one in given or () if one not in SCOPES]
    if unknown:
        raise InvalidInput(
            f"There is no scope {unknown[0]!r:.60}.", code="INVALID_SCOPES", fix=f"Use some of {', '.join(SCOPES)}."
        )
    return None if given is None else tuple(sorted(set(given)))


def _within(address: str | None, networks: tuple[str, ...]) -> bool:
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in ipaddress.ip_network(one) for one in networks)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
