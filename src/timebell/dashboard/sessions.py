"""Who looks at a page: a session's cookie, or in `dev` everyone on this machine. And who has sent a form.

The cookie holds 256 bits by chance, the store a digest of them. A form needs the cookie (SameSite=Lax), a browser
that says it comes from a page of ours, and a token that only our pages know.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from urllib.parse import unquote

from fastapi import Request, Response

from timebell.api.authentication import TENANT_HEADER, Caller, Door, Unauthorized
from timebell.app import Timebell
from timebell.client.validation import text as name_text
from timebell.errors import InvalidInput, Refused
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import api_keys as key_rows
from timebell.store.tenancy import users
from timebell.store.transaction import Transaction
from timebell.tenancy import passwords
from timebell.tenancy.keys import Key
from timebell.tenancy.users import LONGEST, Session, User, session_id

COOKIE = "__Host-timebell"
TENANT = "timebell-tenant"
HASHING = 2  # passwords that are looked at at once: each takes 32 MiB and a core


class WrongPassword(Unauthorized):
    """The name or the password is wrong, or there were too many tries; the answer is the same."""

    code = "WRONG_PASSWORD"


@dataclass(frozen=True, slots=True)
class Seen:
    """Who looks, and the token of their forms. `signed_in` is false for those whom `dev` lets in as they are."""

    caller: Caller
    token: str
    signed_in: bool


class Sessions:
    """Sign-in, sign-out, and who is there."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._here = secrets.token_urlsafe(32)
        self._hashing = asyncio.Semaphore(HASHING)

    async def seen(self, door: Door, request: Request) -> Seen | None:
        """Who looks; None: nobody that is known. Raises Refused (NOT_LOCAL)."""
        token = request.cookies.get(COOKIE)
        found = None if token is None else await self._of(token, request)
        if found is not None:
            return found
        if not door.open_here:
            return None
        local = await door.admit(request)
        return Seen(_in_tenant(local, None, request), _form_token(self._here), signed_in=False)

    async def _of(self, token: str, request: Request) -> Seen | None:
        app, address = self._app, _address(request)
        now = app.clock.now()
        found = await app.store.run(users.who, session_id(token), now)
        if found is None:
            return None
        session, user = found
        if user is not None:
            caller = Caller(user.name, "default", user.role, address)
            return Seen(_in_tenant(caller, user.tenant_id, request), _form_token(token), signed_in=True)
        key = await app.store.run(key_rows.find, session.key_id or "")
        if key is None or not key[0].usable(now, address):
            return None
        caller = Caller(key[0].name, "default", key[0].role, address, key[0])
        return Seen(_in_tenant(caller, key[0].tenant_id, request), _form_token(token), signed_in=True)

    async def sign_in(self, door: Door, request: Request, name: str, password: str) -> str:
        """A new session by password; its token. Guesses are limited by address, here, and by name, in the store.

        Raises WrongPassword, TooManyWrongKeys.
        """
        app, address = self._app, _address(request)
        guess = door.guess(address)
        async with self._hashing:
            tried = await app.store.run(users.trying, name, app.clock.now())
            right = await asyncio.to_thread(passwords.matches, tried[1] if tried else None, password)
        if tried is None or not right:
            raise WrongPassword(
                "That name and password open nothing.", fix="Check both. After some tries, wait a while: it is locked."
            )
        door.guessed(address, guess)
        return await self._begin(request, tried[0], None)

    async def sign_in_with_key(self, door: Door, request: Request, text: str) -> str:
        """A new session by an API key; its token. Raises Unauthorized, TooManyWrongKeys, Refused (SCOPE_MISSING)."""
        key = await door.check(text, _address(request))
        if key.scopes is not None:
            raise Refused(
                f"This key is for {', '.join(key.scopes)} alone, and pages show everything.", code="SCOPE_MISSING",
                fix="Sign in with one that has no scopes.",
            )  # fmt: skip
        return await self._begin(request, None, key)

    async def _begin(self, request: Request, user: User | None, key: Key | None) -> str:
        token, now = secrets.token_urlsafe(32), self._app.clock.now()
        session = Session(
            id=session_id(token), user_id=user.id if user else None, key_id=key.id if key else None, created_at=now,
            seen_at=now,
        )  # fmt: skip
        old = request.cookies.get(COOKIE)
        who = user or key
        assert who is not None
        record = AuditRecord(
            id=new_id(now), tenant_id=who.tenant_id or "default", at=now, actor=who.name, action="session.begin",
            subject=who.name, key_id=key.id if key else None, address=_address(request), request_id=request.state.id,
        )  # fmt: skip

        def write(tx: Transaction) -> None:
            users.begin(tx, session, None if old is None else session_id(old))
            audit_log.write(tx, record)

        await self._app.store.run(write)
        return token

    async def still(self, request: Request) -> bool:
        """Whether a page that is open may go on showing news; that alone keeps no session alive."""
        token = request.cookies.get(COOKIE)
        if token is None:
            return True
        return await self._app.store.run(users.who, session_id(token), self._app.clock.now(), look=True) is not None

    async def sign_out(self, request: Request) -> None:
        """The session of this browser is over."""
        token = request.cookies.get(COOKIE)
        if token is not None:
            await self._app.store.run(users.end, session_id(token))


def give(response: Response, token: str | None) -> None:
    """Let the browser keep a session's token, or forget it."""
    flags: dict[str, object] = {"path": "/", "secure": True, "httponly": True, "samesite": "lax"}
    if token is None:
        response.delete_cookie(COOKIE, **flags)  # type: ignore[arg-type]
    else:
        response.set_cookie(COOKIE, token, max_age=int(LONGEST / timedelta(seconds=1)), **flags)  # type: ignore[arg-type]


def check_origin(request: Request) -> None:
    """A form comes from a page of ours. Raises Refused (NOT_OUR_PAGE)."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin", "null")
    place = origin.partition("://")[2]
    ours = bool(place) and place == request.headers.get("host")
    if site != "same-origin" if site is not None else not ours:
        raise Refused("This form was not sent by a page of Timebell.", code="NOT_OUR_PAGE", fix="Open the page again.")


def check_token(seen: Seen, given: str) -> None:
    """A form was made for who sends it. Raises Refused (FORM_EXPIRED)."""
    if not hmac.compare_digest(seen.token.encode(), given.encode(errors="replace")):
        raise Refused(
            "This form is of another session, or too old.", code="FORM_EXPIRED", fix="Load the page again, and send it."
        )


def _form_token(token: str) -> str:
    return sha256(f"form {token}".encode()).hexdigest()[:40]


def _in_tenant(caller: Caller, own: str | None, request: Request) -> Caller:
    """The caller in their tenant; those of the platform choose one, by URL or cookie."""
    named = own
    if named is None:
        named = (
            request.headers.get(TENANT_HEADER)
            or request.query_params.get("tenant")
            or unquote(request.cookies.get(TENANT, ""))
        )
    try:
        tenant_id = name_text(named or "default", "tenant_id")
    except InvalidInput:
        tenant_id = "default"
    return Caller(caller.actor, tenant_id, caller.role, caller.address, caller.key, own is None and bool(named))


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
