"""Repository of the second step of sign-ins: TOTP secrets and recovery codes of users, encrypted."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Any

import orjson
from sqlalchemy import Row, select, update

from timebell.errors import Conflict, NotFound
from timebell.store.schema import users
from timebell.store.tenancy.secrets import find_cipher, get_or_create_cipher
from timebell.store.tenancy.users import count_sign_in_failure, delete_sign_in_failures, end_sessions
from timebell.store.transaction import Transaction
from timebell.tenancy import totp
from timebell.tenancy.secrets import Keyring, TenantCipher
from timebell.tenancy.users import CODE_FAILURES_BEFORE_LOCK, DEFAULT_TENANT, FAILURES_BEFORE_LOCK, User

ANY_NETWORK = "any"


class CodeMatch(Enum):
    """Kind of a correct code."""

    APP = "app"
    RECOVERY = "recovery"


def begin_enrollment(tx: Transaction, keyring: Keyring, user: User, secret: str, now: datetime) -> None:
    """Store a secret that counts once it is confirmed. Raises Conflict (TOTP_ENABLED), Refused."""
    if _lock_user(tx, user.id).totp_enabled_at is not None:
        raise Conflict(
            "The second step is already set up.", code="TOTP_ENABLED", existing=user.name, fix="Turn it off first."
        )
    cipher = get_or_create_cipher(tx, keyring, _key_tenant(user), now)
    tx.execute(update(users).where(users.c.id == user.id).values(
        totp_secret=cipher.encrypt(secret, _location(user, "totp_secret")), totp_last_step=None,
    ))  # fmt: skip


def find_unconfirmed_secret(tx: Transaction, keyring: Keyring, user: User) -> str | None:
    """Return the secret of an enrollment that is not confirmed yet; None if there is none. Raises Refused."""
    row = tx.execute(select(users).where(users.c.id == user.id)).first()
    if row is None or row.totp_enabled_at is not None or row.totp_secret is None:
        return None
    return _cipher(tx, keyring, user).decrypt(row.totp_secret, _location(user, "totp_secret"))


def confirm_enrollment(
    tx: Transaction, keyring: Keyring, user: User, code: str, recovery_codes: list[str], now: datetime
) -> bool:
    """Enable the second step if the code is that of the stored secret, and end the user's sessions. Raises Refused."""
    row = _lock_user(tx, user.id)
    secret = find_unconfirmed_secret(tx, keyring, user)
    step = None if secret is None else totp.find_step(secret, code, now, row.totp_last_step)
    if step is None:
        return False
    tx.execute(update(users).where(users.c.id == user.id).values(totp_enabled_at=now, totp_last_step=step))
    set_recovery_codes(tx, keyring, user, recovery_codes)
    end_sessions(tx, user.id)
    return True


def set_recovery_codes(tx: Transaction, keyring: Keyring, user: User, codes: list[str]) -> None:
    """Replace the recovery codes of a user. Raises Refused."""
    _store_digests(tx, _cipher(tx, keyring, user), user, [totp.recovery_code_digest(code) for code in codes])


def count_recovery_codes(tx: Transaction, keyring: Keyring, user: User) -> int:
    """Return how many recovery codes are left. Raises Refused."""
    return len(_load_digests(_cipher(tx, keyring, user), user, _lock_user(tx, user.id)))


def use_code(
    tx: Transaction, keyring: Keyring, user: User, code: str, network: str, now: datetime
) -> CodeMatch | None:  # fmt: skip
    """Use up a code of the app or a recovery code; None if it is wrong, used, or locked. Raises Refused.

    Failures are counted per client network, like passwords, and also over all networks, because a code is short. While
    too many networks guess, recovery codes still work: they cannot be guessed.
    """
    row = _lock_user(tx, user.id)
    if row.disabled_at is not None or row.totp_enabled_at is None:
        return None
    if not count_sign_in_failure(tx, user.id, "code", network, now, FAILURES_BEFORE_LOCK):
        return None
    accepts_app_codes = count_sign_in_failure(tx, user.id, "code", ANY_NETWORK, now, CODE_FAILURES_BEFORE_LOCK)
    cipher = _cipher(tx, keyring, user)
    digests, digest = _load_digests(cipher, user, row), totp.recovery_code_digest(code)
    match: CodeMatch | None = None
    if digest in digests:
        digests.remove(digest)
        _store_digests(tx, cipher, user, digests)
        match = CodeMatch.RECOVERY
    elif accepts_app_codes:
        secret = cipher.decrypt(row.totp_secret, _location(user, "totp_secret"))
        step = totp.find_step(secret, code, now, row.totp_last_step)
        if step is not None:
            tx.execute(update(users).where(users.c.id == user.id).values(totp_last_step=step))
            match = CodeMatch.APP
    if match is not None:
        for place in (network, ANY_NETWORK):
            delete_sign_in_failures(tx, user.id, "code", place, now)
    return match


def remove_totp(tx: Transaction, user_id: str) -> None:
    """Remove the second step of a user and end the user's sessions."""
    tx.execute(update(users).where(users.c.id == user_id).values(
        totp_secret=None, totp_recovery_codes=None, totp_enabled_at=None, totp_last_step=None,
    ))  # fmt: skip
    end_sessions(tx, user_id)


def _lock_user(tx: Transaction, user_id: str) -> Row[Any]:
    row = tx.execute(select(users).where(users.c.id == user_id).with_for_update()).first()
    if row is None:
        raise NotFound("The user was deleted.", code="USER_NOT_FOUND", fix="Ask an admin.")
    return row


def _store_digests(tx: Transaction, cipher: TenantCipher, user: User, digests: list[str]) -> None:
    encrypted = cipher.encrypt(orjson.dumps(digests).decode(), _location(user, "totp_recovery_codes"))
    tx.execute(update(users).where(users.c.id == user.id).values(totp_recovery_codes=encrypted))


def _load_digests(cipher: TenantCipher, user: User, row: Row[Any]) -> list[str]:
    if row.totp_recovery_codes is None:
        return []
    digests: list[str] = orjson.loads(cipher.decrypt(row.totp_recovery_codes, _location(user, "totp_recovery_codes")))
    return digests


def _cipher(tx: Transaction, keyring: Keyring, user: User) -> TenantCipher:
    cipher = find_cipher(tx, keyring, _key_tenant(user))
    assert cipher is not None  # was created with the secret
    return cipher


def _key_tenant(user: User) -> str:
    """Return the tenant whose data key encrypts for this user."""
    return user.tenant_id or DEFAULT_TENANT


def _location(user: User, column: str) -> tuple[str | int, ...]:
    return _key_tenant(user), "timebell_users", user.id, column, 1
