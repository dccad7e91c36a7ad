"""Who signs in to the dashboard with a password, and for how long a session lasts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

from timebell.tenancy.roles import Role

IDLE, LONGEST = timedelta(minutes=30), timedelta(hours=12)
FREE_TRIES = 5
FIRST_LOCK = 30  # seconds
LONGEST_LOCK = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """One who may sign in. `tenant_id` None: of the platform. Instants are aware UTC."""

    id: str
    tenant_id: str | None
    name: str
    role: Role
    created_at: datetime
    created_by: str | None = None
    last_used_at: datetime | None = None
    disabled_at: datetime | None = None
    locked_until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Somebody who is signed in: a user or a key."""

    id: str
    user_id: str | None
    key_id: str | None
    created_at: datetime
    seen_at: datetime

    def over(self, now: datetime) -> bool:
        """Whether it was idle for too long, or lasts too long."""
        return now - self.seen_at >= IDLE or now - self.created_at >= LONGEST


def lock_after(failures: int) -> timedelta | None:
    """How long nobody may try after so many wrong passwords in a row: twice as long each time, up to an hour."""
    if failures < FREE_TRIES:
        return None
    return min(LONGEST_LOCK, timedelta(seconds=FIRST_LOCK * 2 ** min(failures - FREE_TRIES, 10)))


def session_id(token: str) -> str:
    """What is stored of the token in a cookie: 256 bits by chance need no slow hash."""
    return sha256(token.encode(errors="replace")).hexdigest()
