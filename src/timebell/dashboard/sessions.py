"""Sessions of dashboard users, and CSRF checks of forms.

A session cookie contains 256 random bits; the store has only their digest. `timebell dev` also accepts requests from
the local machine without a session. A form needs the cookie (SameSite=Lax), a same-origin `Sec-Fetch-Site` or `Origin`
header, and the form token that the page contains.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from urllib.parse import unquote

from fastapi import Request, Response

from timebell.api.authentication import TENANT_HEADER, Authenticator, Caller, Unauthorized
from timebell.api.client_address import client_network
from timebell.api.refusals import UNKNOWN_ACTOR
from timebell.app import Timebell
from timebell.client.validation import check_text
from timebell.errors import InvalidInput, Refused
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import api_keys as key_rows
from timebell.store.tenancy import identities, users
from timebell.store.transaction import Transaction
from timebell.tenancy import passwords
from timebell.tenancy.identities import Identity
from timebell.tenancy.keys import Key
from timebell.tenancy.users import SESSION_MAX_AGE, Session, User, session_id

SESSION_COOKIE = "__Host-timebell"
TENANT_COOKIE = "timebell-tenant"


class WrongPassword(Unauthorized):
    """Wrong name or password, or too many attempts; the response does not tell these cases apart."""

    code = "WRONG_PASSWORD"


@dataclass(frozen=True, slots=True)
class Visitor:
    """The user of a page. `token`: for their forms. `signed_in`: false for local access without a session.

    `issuer`: identity provider at which the user signed in; None for a password or an API key.
    """

    caller: Caller
    token: str
    signed_in: bool
    issuer: str | None = None


class Sessions:
    """Sign users in and out, and identify them by their session cookie."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._local_token = secrets.token_urlsafe(32)

    async def identify(self, authenticator: Authenticator, request: Request) -> Visitor | None:
        """Return the user of a request; None: not signed in. Raises Refused (NOT_LOCAL)."""
        token = request.cookies.get(SESSION_COOKIE)
        visitor = None if token is None else await self._find_visitor(token, request)
        if visitor is not None:
            return visitor
        if not authenticator.allow_local:
            return None
        local = await authenticator.authenticate(request)
        return Visitor(_with_tenant(local, None, request), _form_token(self._local_token), signed_in=False)

    async def _find_visitor(self, token: str, request: Request) -> Visitor | None:
        app, address = self._app, _address(request)
        now = app.clock.now()
        row = await app.store.run(users.find_session, session_id(token), now)
        if row is None:
            return None
        session, user = row
        if user is not None:
            caller = Caller(user.name, "default", user.role, address, kind="user")
            return Visitor(_with_tenant(caller, user.tenant_id, request), _form_token(token), True, user.issuer)
        key = await app.store.run(key_rows.find_key, session.key_id or "")
        if key is None or not key[0].is_usable(now, address):
            return None
        caller = Caller(key[0].name, "default", key[0].role, address, key[0])
        return Visitor(_with_tenant(caller, key[0].tenant_id, request), _form_token(token), signed_in=True)

    async def sign_in(self, authenticator: Authenticator, request: Request, name: str, password: str) -> str:
        """Start a session by password and return its token.

        Failed attempts are limited per client network in this process, and per user and network in the store: others
        cannot lock a user out. Raises WrongPassword, TooManySignIns, TooBusy, Refused (PASSWORDS_DISABLED).
        """
        if not self._app.settings.password_sign_in:
            raise Refused("This server accepts no passwords.", code="PASSWORDS_DISABLED",
                          fix="Sign in at the identity provider, or with an API key.")  # fmt: skip
        app, address = self._app, _address(request)
        attempt, network = authenticator.failures.begin_sign_in(address), client_network(address)
        async with authenticator.capacity.sign_ins.hold(network):
            account = await app.store.run(users.record_sign_in_attempt, name, network, app.clock.now())
            # Hashes also for an unknown name, so that the response time does not reveal which names exist.
            is_correct = await asyncio.to_thread(passwords.verify, account[1] if account else None, password)
        if account is None or not is_correct:
            authenticator.failures.record("wrong_password", address)
            await self._record_failed_sign_in(authenticator, request, name)
            raise WrongPassword(
                "Wrong name or password.", fix="Check both. Several failed attempts lock the user for a while."
            )
        authenticator.failures.forgive_sign_in(address, attempt)
        return await self._create_session(request, account[0], None)

    async def sign_in_with_key(self, authenticator: Authenticator, request: Request, key_text: str) -> str:
        """Start a session by API key and return its token.

        Raises Unauthorized, Refused (SCOPE_MISSING).
        """
        key = await authenticator.verify_key(key_text, _address(request))
        if key.scopes is not None:
            raise Refused(
                f"This key is restricted to {', '.join(key.scopes)}; the dashboard needs all scopes.",
                code="SCOPE_MISSING", fix="Sign in with a key without scopes.",
            )  # fmt: skip
        return await self._create_session(request, None, key)

    async def sign_in_identity(self, request: Request, identity: Identity) -> str:
        """Start a session of an identity and return its token. Creates the user, or updates its role and tenant.

        Raises Refused (USER_DISABLED, USER_NAME_TAKEN).
        """
        now = self._app.clock.now()

        def write(tx: Transaction) -> User:
            user, action = identities.sign_in_identity(tx, identity, new_id(now), now)
            if action is not None:
                audit_log.write_record(tx, AuditRecord(
                    id=new_id(now), tenant_id=user.tenant_id or "default", at=now, actor=identities.CREATED_BY,
                    actor_kind="engine",
                    action=action, subject=user.name, address=_address(request), request_id=request.state.id,
                ))  # fmt: skip
            return user

        return await self._create_session(request, await self._app.store.run(write), None)

    async def end_sessions_of_identity(self, issuer: str, subject: str) -> None:
        """End all sessions of an identity that may not sign in any more."""
        await self._app.store.run(identities.end_sessions_of_identity, issuer, subject)

    async def _record_failed_sign_in(self, authenticator: Authenticator, request: Request, name: str) -> None:
        """Record a failed sign-in: with the name of a user that exists, as people type passwords into that field."""
        user = await self._app.store.run(users.find_user, name)
        await authenticator.refusals.record(
            tenant_id=(user.tenant_id if user else None) or "default", actor=user.name if user else UNKNOWN_ACTOR,
            actor_kind="user", network=client_network(_address(request)), address=_address(request),
            action="session.begin", subject=user.name if user else None, code=WrongPassword.code,
            request_id=request.state.id, authenticated=False,
        )  # fmt: skip

    async def _create_session(self, request: Request, user: User | None, key: Key | None) -> str:
        token, now = secrets.token_urlsafe(32), self._app.clock.now()
        session = Session(
            id=session_id(token), user_id=user.id if user else None, key_id=key.id if key else None, created_at=now,
            seen_at=now,
        )  # fmt: skip
        old_token = request.cookies.get(SESSION_COOKIE)
        identity = user or key
        assert identity is not None
        record = AuditRecord(
            id=new_id(now), tenant_id=identity.tenant_id or "default", at=now, actor=identity.name,
            actor_kind="user" if user else "key", action="session.begin", subject=identity.name,
            key_id=key.id if key else None, address=_address(request),
            request_id=request.state.id,
        )  # fmt: skip

        def write(tx: Transaction) -> None:
            users.create_session(tx, session, None if old_token is None else session_id(old_token))
            if user is not None:
                users.forget_sign_in_failures(tx, user.id, client_network(_address(request)), now)
            audit_log.write_record(tx, record)

        await self._app.store.run(write)
        return token

    async def is_active(self, request: Request) -> bool:
        """Return whether an open page may still receive events. Does not extend the session."""
        token = request.cookies.get(SESSION_COOKIE)
        if token is None:
            return True
        return (
            await self._app.store.run(users.find_session, session_id(token), self._app.clock.now(), peek=True)
            is not None
        )

    async def sign_out(self, request: Request, visitor: Visitor) -> None:
        """Delete the session of this browser."""
        token = request.cookies.get(SESSION_COOKIE)
        if token is None:
            return
        now, caller = self._app.clock.now(), visitor.caller
        record = AuditRecord(
            id=new_id(now), tenant_id=caller.tenant_id, at=now, actor=caller.actor, actor_kind=caller.kind,
            action="session.end", subject=caller.actor, key_id=caller.key.id if caller.key else None,
            address=caller.address, request_id=request.state.id,
        )  # fmt: skip

        def write(tx: Transaction) -> None:
            users.delete_session(tx, session_id(token))
            audit_log.write_record(tx, record)

        await self._app.store.run(write)


def set_session_cookie(response: Response, token: str | None) -> None:
    """Set the session cookie; None: delete it."""
    flags: dict[str, object] = {"path": "/", "secure": True, "httponly": True, "samesite": "lax"}
    if token is None:
        response.delete_cookie(SESSION_COOKIE, **flags)  # type: ignore[arg-type]
    else:
        response.set_cookie(SESSION_COOKIE, token, max_age=int(SESSION_MAX_AGE / timedelta(seconds=1)), **flags)  # type: ignore[arg-type]


def check_origin(request: Request) -> None:
    """Reject forms from other origins. Raises Refused (CROSS_SITE_REQUEST)."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin", "null")
    origin_host = origin.partition("://")[2]
    is_same_host = bool(origin_host) and origin_host == request.headers.get("host")
    if site != "same-origin" if site is not None else not is_same_host:
        raise Refused(
            "This form was not sent by a Timebell page.", code="CROSS_SITE_REQUEST", fix="Open the page again."
        )


def check_token(visitor: Visitor, token: str) -> None:
    """Reject a form whose token does not match the session. Raises Refused (FORM_EXPIRED)."""
    if not hmac.compare_digest(visitor.token.encode(), token.encode(errors="replace")):
        raise Refused(
            "This form belongs to another or an expired session.", code="FORM_EXPIRED",
            fix="Reload the page and send the form again.",
        )  # fmt: skip


def _form_token(token: str) -> str:
    return sha256(f"form {token}".encode()).hexdigest()[:40]


def _with_tenant(caller: Caller, own_tenant_id: str | None, request: Request) -> Caller:
    """Return the caller in their tenant. Platform users select a tenant by header, URL or cookie."""
    selected = own_tenant_id
    if selected is None:
        selected = (
            request.headers.get(TENANT_HEADER)
            or request.query_params.get("tenant")
            or unquote(request.cookies.get(TENANT_COOKIE, ""))
        )
    try:
        tenant_id = check_text(selected or "default", "tenant_id")
    except InvalidInput:
        tenant_id = "default"
    return replace(caller, tenant_id=tenant_id, names_tenant=own_tenant_id is None and bool(selected))


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
