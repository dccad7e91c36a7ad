"""Sessions of dashboard users, and CSRF checks of forms.

A session cookie contains 256 random bits; the store has only their digest. `timebell dev` also accepts requests from
the local machine without a session. A form needs the cookie (SameSite=Lax), a same-origin `Sec-Fetch-Site` or `Origin`
header, and the form token that the page contains.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote, unquote

from fastapi import Request, Response

from timebell.api.authentication import TENANT_HEADER, Authenticator, Caller, Unauthorized
from timebell.api.client_address import client_network
from timebell.app import Timebell
from timebell.client.validation import check_text
from timebell.dashboard.credentials import check_code, check_password, request_address
from timebell.errors import InvalidInput, Refused
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import api_keys as key_rows
from timebell.store.tenancy import identities, users
from timebell.store.tenancy.totp import CodeMatch
from timebell.store.transaction import Transaction
from timebell.tenancy.identities import Identity
from timebell.tenancy.keys import Key
from timebell.tenancy.users import CODE_TIMEOUT, SESSION_MAX_AGE, Session, User, session_id

SESSION_COOKIE = "__Host-timebell"
CODE_COOKIE = "__Host-timebell-code"  # of a session that awaits a code
TENANT_COOKIE = "timebell-tenant"


class SignInExpired(Unauthorized):
    """Too long between the password and the code."""

    code = "SIGN_IN_EXPIRED"


class SignIn(NamedTuple):
    """A new session: the token for its cookie, and whether it awaits a code."""

    token: str
    awaits_code: bool = False
    used_recovery_code: bool = False


@dataclass(frozen=True, slots=True)
class Visitor:
    """The user of a page. `token`: for their forms. `signed_in`: false for local access without a session.

    `user` is None for an API key and for local access.
    """

    caller: Caller
    token: str
    signed_in: bool
    user: User | None = None


class Sessions:
    """Sign users in and out, and identify them by their session cookie."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._local_token = secrets.token_urlsafe(32)

    async def identify(self, authenticator: Authenticator, request: Request) -> Visitor | None:
        """Return the user of a request; None: not signed in. Raises Refused (NOT_LOCAL)."""
        token = request.cookies.get(SESSION_COOKIE)
        if token is not None:
            # Few per client at a time: invented tokens must not occupy the connections to the database.
            async with authenticator.capacity.lookups.hold(client_network(request_address(request))):
                visitor = await self._find_visitor(token, request)
            if visitor is not None:
                return visitor
        if not authenticator.allow_local:
            return None
        local = await authenticator.authenticate(request)
        return Visitor(_with_tenant(local, None, request), _form_token(self._local_token), signed_in=False)

    async def _find_visitor(self, token: str, request: Request, *, peek: bool = False) -> Visitor | None:
        app, address = self._app, request_address(request)
        now = app.clock.now()
        row = await app.store.run(users.find_session, session_id(token), now, peek=peek)
        if row is None:
            return None
        session, user = row
        if user is not None:
            caller = Caller(user.name, "default", user.role, address, kind="user")
            return Visitor(_with_tenant(caller, user.tenant_id, request), _form_token(token), True, user)
        key = await app.store.run(key_rows.find_key, session.key_id or "")
        if key is None or not key[0].is_usable(now, address):
            return None
        caller = Caller(key[0].name, "default", key[0].role, address, key[0])
        return Visitor(_with_tenant(caller, key[0].tenant_id, request), _form_token(token), signed_in=True)

    async def sign_in(self, authenticator: Authenticator, request: Request, name: str, password: str) -> SignIn:
        """Start a session by password; it awaits a code if the user has a second step.

        Raises WrongPassword, TooManySignIns, TooBusy, Refused (PASSWORDS_DISABLED).
        """
        user = await check_password(authenticator, request, name, password)
        if user.totp_enabled_at is None:
            return SignIn(await self._create_session(request, user, None))
        token, now = secrets.token_urlsafe(32), self._app.clock.now()
        session = Session(
            id=session_id(token), user_id=user.id, key_id=None, awaits_code=True, created_at=now, seen_at=now
        )
        await self._app.store.run(users.create_session, session, None)
        return SignIn(token, awaits_code=True)

    async def sign_in_with_code(self, authenticator: Authenticator, request: Request, code: str) -> SignIn:
        """Start a session of a user who has given the password, by code of the second step.

        Raises WrongCode, SignInExpired, TooManySignIns, Refused.
        """
        awaiting_id = session_id(request.cookies.get(CODE_COOKIE, ""))
        async with authenticator.capacity.lookups.hold(client_network(request_address(request))):  # as in `identify`
            found = await self._app.store.run(users.find_session, awaiting_id, self._app.clock.now(), awaits_code=True)
        if found is None or found[1] is None:
            raise SignInExpired("This sign-in has expired.", fix="Enter name and password again.")
        match = await check_code(authenticator, request, found[1], code)
        await self._app.store.run(users.delete_session, awaiting_id)
        token = await self._create_session(request, found[1], None, match)
        return SignIn(token, used_recovery_code=match is CodeMatch.RECOVERY)

    async def sign_in_with_key(self, authenticator: Authenticator, request: Request, key_text: str) -> str:
        """Start a session by API key and return its token.

        Raises Unauthorized, Refused (SCOPE_MISSING).
        """
        key = await authenticator.verify_key(key_text, request_address(request))
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
                    action=action, subject=user.name, address=request_address(request), request_id=request.state.id,
                ))  # fmt: skip
            return user

        return await self._create_session(request, await self._app.store.run(write), None)

    async def renew(self, request: Request, user: User) -> str:
        """Start a session in place of this browser's and return its token. For changes that end all sessions."""
        return await self._create_session(request, user, None)

    async def end_sessions_of_identity(self, issuer: str, subject: str) -> None:
        """End all sessions of an identity that may not sign in any more."""
        await self._app.store.run(identities.end_sessions_of_identity, issuer, subject)

    async def _create_session(
        self, request: Request, user: User | None, key: Key | None, match: CodeMatch | None = None
    ) -> str:
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
            key_id=key.id if key else None, address=request_address(request),
            request_id=request.state.id, after=None if match is None else {"code": match.value},
        )  # fmt: skip

        def write(tx: Transaction) -> None:
            users.create_session(tx, session, None if old_token is None else session_id(old_token))
            audit_log.write_record(tx, record)

        await self._app.store.run(write)
        return token

    async def is_active(self, request: Request) -> bool:
        """Return whether an open page may still receive events. Does not extend the session."""
        token = request.cookies.get(SESSION_COOKIE)
        return token is None or await self._find_visitor(token, request, peek=True) is not None

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
    _set_cookie(response, SESSION_COOKIE, token, SESSION_MAX_AGE)


def set_code_cookie(response: Response, token: str | None) -> None:
    """Set the cookie of a session that awaits a code; None: delete it."""
    _set_cookie(response, CODE_COOKIE, token, CODE_TIMEOUT)


def _set_cookie(response: Response, name: str, token: str | None, max_age: timedelta) -> None:
    response.set_cookie(
        name, token or "", max_age=0 if token is None else int(max_age.total_seconds()), path="/", secure=True,
        httponly=True, samesite="lax",
    )  # fmt: skip


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
    if own_tenant_id is None and selected:
        return select_tenant(caller, selected)
    return replace(caller, tenant_id=own_tenant_id or "default", specifies_tenant=False)


def select_tenant(caller: Caller, tenant_id: str) -> Caller:
    """Return a platform user in the tenant that they selected; an invalid one is `default`."""
    try:
        return replace(caller, tenant_id=check_text(tenant_id, "tenant_id"), specifies_tenant=True)
    except InvalidInput:
        return replace(caller, tenant_id="default", specifies_tenant=True)


def set_tenant_cookie(response: Response, tenant_id: str) -> None:
    """Store the tenant that a platform user selected."""
    response.set_cookie(TENANT_COOKIE, quote(tenant_id, safe=""), path="/ui", samesite="lax", httponly=True)
