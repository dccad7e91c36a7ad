"""Dashboard users, their sessions, and the lock after failed sign-ins."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256

from timebell.errors import InvalidInput, Refused
from timebell.tenancy.roles import Role

SESSION_IDLE_TIMEOUT, SESSION_MAX_AGE = timedelta(minutes=30), timedelta(hours=12)
CODE_TIMEOUT = timedelta(minutes=10)  # between the password and the code
FAILURES_BEFORE_LOCK = 5
CODE_FAILURES_BEFORE_LOCK = 20  # from all networks together
FIRST_LOCK_SECONDS = 30
MAX_LOCK = timedelta(hours=1)


DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Dashboard user. `tenant_id` None marks a platform user. Datetimes are aware UTC.

    The name is unique in the tenant; users of the platform and of `default` share their names.

    `issuer` and `subject` identify a user of an identity provider; None for a user with a password.
    """

    id: str
    tenant_id: str | None
    name: str
    role: Role
    created_at: datetime
    created_by: str | None = None
    last_used_at: datetime | None = None
    disabled_at: datetime | None = None
    issuer: str | None = None
    subject: str | None = None
    totp_enabled_at: datetime | None = None
    """Since when a code is required to sign in; None: the password is enough."""

    @property
    def sign_in_name(self) -> str:
        """Name for the sign-in form and the command line: `name`, or `tenant/name` outside of the tenant `default`."""
        return self.name if self.tenant_id in (None, DEFAULT_TENANT) else f"{self.tenant_id}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Dashboard session of a user or of an API key. One that awaits a code is not signed in."""

    id: str
    user_id: str | None
    key_id: str | None
    created_at: datetime
    seen_at: datetime
    awaits_code: bool = False

    def is_expired(self, now: datetime) -> bool:
        """Return whether the session exceeded its idle timeout or its maximum age."""
        if self.awaits_code:
            return now - self.created_at >= CODE_TIMEOUT
        return now - self.seen_at >= SESSION_IDLE_TIMEOUT or now - self.created_at >= SESSION_MAX_AGE


def parse_sign_in_name(text: str) -> tuple[str, str]:
    """Return the tenant and the name of a sign-in name."""
    tenant_id, slash, name = text.rpartition("/")
    return (tenant_id, name) if slash else (DEFAULT_TENANT, name)


def check_user_name(name: str) -> str:
    """Return the name of a new user. Raises InvalidInput (INVALID_NAME)."""
    if "/" in name:
        raise InvalidInput(
            f"name is {name!r:.60}, which contains a slash.", code="INVALID_NAME",
            fix="A slash separates tenant and name at the sign-in.",
        )  # fmt: skip
    return name


def check_role_change(user: User, role: Role) -> None:
    """Check that a user may get a role. Raises Refused (ROLE_FIXED, MANAGED_BY_PROVIDER)."""
    check_managed_here(user)
    if role is not user.role and Role.PLATFORM in (role, user.role):
        raise Refused(
            "A user cannot change between a tenant and the platform.", code="ROLE_FIXED", fix="Create another user."
        )


def check_managed_here(user: User) -> None:
    """Check that the role and the password of a user belong to Timebell. Raises Refused (MANAGED_BY_PROVIDER)."""
    if user.issuer is not None:
        raise Refused(
            f"{user.name} signs in at {user.issuer}, which determines the role.", code="MANAGED_BY_PROVIDER",
            fix="Change the groups there, or TIMEBELL_OIDC_ROLE_MAP. Disabling the user works here.",
        )  # fmt: skip


def lock_duration(failures: int, failures_before_lock: int = FAILURES_BEFORE_LOCK) -> timedelta | None:
    """Return the lock duration after consecutive failures; it doubles each time, up to one hour."""
    if failures < failures_before_lock:
        return None
    return min(MAX_LOCK, timedelta(seconds=FIRST_LOCK_SECONDS * 2 ** min(failures - failures_before_lock, 10)))


def session_id(token: str) -> str:
    """Return the stored hash of a session cookie's token. A token of 256 random bits needs no slow hash."""
    return sha256(token.encode(errors="replace")).hexdigest()
