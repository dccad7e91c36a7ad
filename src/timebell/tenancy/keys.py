"""API keys: `tb_live_<id>_<secret><checksum>`.

The id identifies the row, the secret is 192 random bits from the operating system, and the CRC-32 checksum detects
mistyped and malformed keys offline. The database stores an HMAC-SHA-256 of the whole key under the installation's
secret key, so a stolen database contains no usable keys. A slow hash is unnecessary because the secret is random.
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
from timebell.tenancy.secrets import split_secret_keys

ENVIRONMENT = "live"
# Scopes that a key can be restricted to: the first path segment under /api/v1.
SCOPES = (
    "schedules", "jobs", "claims", "dead-letters", "operations", "calendars", "nodes", "events", "audit", "audit-log",
    "forecast", "backlogs", "tenants", "keys", "users", "queues", "pause-all", "resume-all", "targets", "secrets",
    "connections", "sources", "hooks", "triggers",
    "devices", "audiences", "segments", "campaigns", "opens",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Stored attributes of a key, without its secret. Datetimes are aware UTC.

    `tenant_id` None marks a platform key. `scopes` and `networks` None mean unrestricted.
    """

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

    def is_usable(self, now: datetime, address: str | None) -> bool:
        """Return whether the key is neither revoked nor expired and may be used from this IP address."""
        if self.revoked_at is not None or (self.expires_at is not None and self.expires_at <= now):
            return False
        return self.networks is None or _is_in_networks(address, self.networks)

    def permits(self, scope: str) -> bool:
        """Return whether the key may be used for this scope."""
        return self.scopes is None or scope in self.scopes


def generate_key() -> tuple[str, str]:
    """Generate a key; return its id and its full text, which is shown only once."""
    id_ = secrets.token_hex(6)
    text = f"tb_{ENVIRONMENT}_{id_}_{secrets.token_hex(24)}"
    return id_, text + _checksum(text)


def parse_key_id(text: str) -> str | None:
    """Return the id in a key's text, or None if the text is not a well-formed key."""
    parts = text.split("_") if text.isascii() and len(text) < 200 else []
    if len(parts) != 4 or parts[0] != "tb" or not parts[2] or _checksum(text[:-8]) != text[-8:]:
        return None
    return parts[2]


def digests(secret_key: str | None, text: str) -> list[str]:
    """Return the digests of an API key under each secret key, newest secret key first."""
    return [hmac.new(key.encode(), text.encode(), sha256).hexdigest() for key in split_secret_keys(secret_key)]


def digest(secret_key: str | None, text: str, *, subject: str = "API keys") -> str:
    """Return the digest to store for an API key.

    Raises Refused (SECRET_KEY_MISSING), which says that `subject`, a plural, requires a secret key.
    """
    all_digests = digests(secret_key, text)
    if not all_digests:
        raise Refused(
            f"{subject} require a secret key, and this installation has none.", code="SECRET_KEY_MISSING",
            fix="Set TIMEBELL_SECRET_KEY on every node: python -c 'import secrets; print(secrets.token_hex(32))'",
        )  # fmt: skip
    return all_digests[0]


def fingerprints(secret_key: str | None) -> tuple[str, ...]:
    """Return a fingerprint of each secret key, newest first: 16 bits, which do not help to guess the key."""
    return tuple(
        hmac.new(key.encode(), b"fingerprint of a node", sha256).hexdigest()[:4]
        for key in split_secret_keys(secret_key)
    )


def digests_match(stored: str, candidate: str) -> bool:
    """Compare two digests in constant time."""
    return hmac.compare_digest(stored, candidate)


def check_networks(networks: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the normalized networks, given in CIDR notation. Raises InvalidInput (INVALID_NETWORKS)."""
    if networks is None:
        return None
    try:
        return tuple(str(ipaddress.ip_network(network)) for network in networks)
    except ValueError as error:
        raise InvalidInput(
            f"{error}.", code="INVALID_NETWORKS", fix='Specify networks such as "192.0.2.0/24".'
        ) from error


def check_scopes(scopes: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the scopes sorted and without duplicates. Raises InvalidInput (INVALID_SCOPES)."""
    unknown = [scope for scope in scopes or () if scope not in SCOPES]
    if unknown:
        raise InvalidInput(
            f"Unknown scope {unknown[0]!r:.60}.", code="INVALID_SCOPES", fix=f"Valid scopes: {', '.join(SCOPES)}."
        )
    return None if scopes is None else tuple(sorted(set(scopes)))


def _is_in_networks(address: str | None, networks: tuple[str, ...]) -> bool:
    try:
        ip = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return any(ip in ipaddress.ip_network(network) for network in networks)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
