"""Verification of passwords and codes, with throttling and audit records of failures.

Failed attempts are limited per client network in this process, and per user and network in the store: others cannot
lock a user out.
"""

from __future__ import annotations

import asyncio

from fastapi import Request

from timebell.api.authentication import Authenticator, Unauthorized
from timebell.api.client_address import client_network
from timebell.api.refusals import UNKNOWN_ACTOR
from timebell.errors import Refused
from timebell.store.tenancy import totp as totp_rows
from timebell.store.tenancy import users
from timebell.store.tenancy.totp import CodeMatch
from timebell.store.transaction import Transaction
from timebell.tenancy import passwords
from timebell.tenancy.secrets import keyring
from timebell.tenancy.users import User, parse_sign_in_name

BEGIN_SESSION = "session.begin"


class WrongPassword(Unauthorized):
    """Wrong name or password, or too many attempts; the response does not tell these cases apart."""

    code = "WRONG_PASSWORD"


class WrongCode(Unauthorized):
    """Wrong or used code of the second step, or too many attempts; the response does not tell these cases apart."""

    code = "WRONG_CODE"


async def check_password(
    authenticator: Authenticator, request: Request, name: str, password: str, action: str = BEGIN_SESSION
) -> User:
    """Return the user with this name and password. `action` is what a failure is recorded as.

    Raises WrongPassword, TooManySignIns, TooBusy, Refused (PASSWORDS_DISABLED).
    """
    app, address = authenticator.app, request_address(request)
    if not app.settings.password_sign_in:
        raise Refused("This server accepts no passwords.", code="PASSWORDS_DISABLED",
                      fix="Sign in at the identity provider, or with an API key.")  # fmt: skip
    attempt, network = authenticator.failures.begin_sign_in(address), client_network(address)
    async with authenticator.capacity.sign_ins.hold(network):
        account = await app.store.run(users.record_sign_in_attempt, name, network, app.clock.now())
        # Hashes also for an unknown name, so that the response time does not reveal which names exist.
        is_correct = await asyncio.to_thread(passwords.verify, account[1] if account else None, password)
    if account is None or not is_correct:
        authenticator.failures.record("wrong_password", address)
        user = account[0] if account else await app.store.run(_find_by_sign_in_name, name)
        await _record_failure(authenticator, request, user, action, WrongPassword.code)
        raise WrongPassword(
            "Wrong name or password.", fix="Check both. Several failed attempts lock the user for a while."
        )
    authenticator.failures.discard_attempt(address, attempt)
    await app.store.run(users.delete_sign_in_failures, account[0].id, "password", network, app.clock.now())
    return account[0]


async def check_code(
    authenticator: Authenticator, request: Request, user: User, code: str, action: str = BEGIN_SESSION
) -> CodeMatch:
    """Use up a code of a user's authenticator app, or a recovery code. `action` is what a failure is recorded as.

    Raises WrongCode, TooManySignIns, Refused (SECRET_KEY_MISSING, SECRET_UNREADABLE).
    """
    app, address = authenticator.app, request_address(request)
    attempt, network = authenticator.failures.begin_sign_in(address), client_network(address)
    keys = keyring(app.settings.secret_key)
    match = await app.store.run(totp_rows.use_code, keys, user, code, network, app.clock.now())
    if match is None:
        authenticator.failures.record("wrong_code", address)
        await _record_failure(authenticator, request, user, action, WrongCode.code)
        raise WrongCode(
            "Wrong or used code.",
            fix="Enter the next code of the app, or a recovery code. Several failed attempts lock you out for a while.",
        )
    authenticator.failures.discard_attempt(address, attempt)
    return match


def _find_by_sign_in_name(tx: Transaction, sign_in_name: str) -> User | None:
    tenant_id, name = parse_sign_in_name(sign_in_name)
    return users.find_user(tx, name, tenant_id)


async def _record_failure(
    authenticator: Authenticator, request: Request, user: User | None, action: str, code: str
) -> None:
    """Record a failure: with the name of a user that exists, as people type passwords into that field."""
    address = request_address(request)
    await authenticator.refusals.record(
        tenant_id=(user.tenant_id if user else None) or "default", actor=user.name if user else UNKNOWN_ACTOR,
        actor_kind="user", network=client_network(address), address=address, action=action,
        subject=user.name if user else None, code=code, request_id=request.state.id, authenticated=False,
    )  # fmt: skip


def request_address(request: Request) -> str:
    """Return the IP address of the client."""
    return request.client.host if request.client else ""
