"""Page of the signed-in user: the password and the second step of the sign-in."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from timebell.api.authentication import Authenticator
from timebell.api.authentication_failures import TooManySignIns
from timebell.dashboard.credentials import WrongCode, check_code, check_password
from timebell.dashboard.fields import to_problem
from timebell.dashboard.sessions import Sessions, set_session_cookie
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput, NotFound, Refused, StoreError, TimebellError
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.tenancy import totp as rows
from timebell.store.tenancy import users
from timebell.store.transaction import Transaction
from timebell.tenancy import passwords, totp
from timebell.tenancy.secrets import Keyring, keyring
from timebell.tenancy.users import DEFAULT_TENANT, User, check_managed_here

routes = APIRouter(route_class=PageRoute)
ISSUER = "Timebell"


@routes.get("/ui/account")
async def account(view: CurrentView) -> Response:
    """Show the signed-in user."""
    return await _render_account(view)


@routes.post("/ui/account/password")
async def change_password(view: CurrentView) -> Response:
    """Set a new password, after the current one; all other sessions of the user end."""
    user = _user(view)
    try:
        check_managed_here(user)
        new_password = passwords.check_length(view.form.get("new_password", ""))
        if view.form.get("repeated_password", "") != new_password:
            raise InvalidInput("The new passwords differ.", code="PASSWORDS_DIFFER", fix="Enter both again.")
        await _check_password(view, user)
        password_hash = await asyncio.to_thread(passwords.hash_password, new_password)
        await view.app.store.run(_set_password, view, user, password_hash)
    except StoreError:
        raise
    except TimebellError as error:
        return await _render_account(view, error)
    return await _keep_session(view, user, view.redirect("/ui/account", "password-changed"))


@routes.post("/ui/account/totp")
async def begin_enrollment(view: CurrentView) -> Response:
    """Show a new secret for an authenticator app, after the password."""
    user, secret = _user(view), totp.generate_secret()
    try:
        await _check_password(view, user)
        await view.app.store.run(rows.begin_enrollment, _keyring(view), user, secret, view.now)
    except StoreError:
        raise
    except TimebellError as error:
        return await _render_account(view, error)
    return _render_enrollment(view, user, secret)


@routes.post("/ui/account/totp/confirm")
async def confirm_enrollment(view: CurrentView) -> Response:
    """Require codes from now on, if the code of the app is correct; show the recovery codes once."""
    user, codes = _user(view), totp.generate_recovery_codes()
    ring, code = _keyring(view), view.form.get("code", "")
    secret = await view.app.store.run(rows.find_unconfirmed_secret, ring, user)
    if secret is None:
        return RedirectResponse("/ui/account", 303)

    def write(tx: Transaction) -> bool:
        is_confirmed = rows.confirm_enrollment(tx, ring, user, code, codes, view.now)
        if is_confirmed:
            _record(tx, view, user, "user.enable_totp")
        return is_confirmed

    if not await view.app.store.run(write):
        error = WrongCode("Wrong code.", fix="Enter the code that the app shows now, and check the clock of the phone.")
        return _render_enrollment(view, user, secret, error)
    return await _render_codes(view, user, codes)


@routes.post("/ui/account/totp/recovery-codes")
async def replace_recovery_codes(view: CurrentView) -> Response:
    """Show new recovery codes once, in place of all older ones."""
    user, codes = _user(view), totp.generate_recovery_codes()

    def write(tx: Transaction) -> None:
        rows.set_recovery_codes(tx, _keyring(view), user, codes)
        _record(tx, view, user, "user.replace_recovery_codes")

    try:
        await _check_second_step(view, user)
        await view.app.store.run(write)
    except StoreError:
        raise
    except TimebellError as error:
        return await _render_account(view, error)
    return view.render("recovery_codes", codes=codes)


@routes.post("/ui/account/totp/disable")
async def disable_totp(view: CurrentView) -> Response:
    """Accept the password alone again."""
    user = _user(view)

    def write(tx: Transaction) -> None:
        rows.remove_totp(tx, user.id)
        _record(tx, view, user, "user.disable_totp")

    try:
        await _check_second_step(view, user)
        await view.app.store.run(write)
    except StoreError:
        raise
    except TimebellError as error:
        return await _render_account(view, error)
    return await _keep_session(view, user, view.redirect("/ui/account", "saved"))


def _set_password(tx: Transaction, view: View, user: User, password_hash: str) -> None:
    users.set_password(tx, user.id, password_hash)
    _record(tx, view, user, "user.change_password")


def _user(view: View) -> User:
    """Return the signed-in user. Raises NotFound (ACCOUNT_MISSING) for API keys and local access."""
    if view.visitor.user is None:
        raise NotFound("Only users have an account page.", code="ACCOUNT_MISSING", fix="Sign in by name.")
    return view.visitor.user


def _keyring(view: View) -> Keyring:
    return keyring(view.app.settings.secret_key)


def _authenticator(view: View) -> Authenticator:
    authenticator: Authenticator = view.request.app.state.authenticator
    return authenticator


async def _check_password(view: View, user: User) -> None:
    password = view.form.get("password", "")[:200]
    await check_password(_authenticator(view), view.request, user.sign_in_name, password, "user.confirm")


async def _check_second_step(view: View, user: User) -> None:
    """Check password and code again, so that an unlocked browser is not enough. Raises Refused (TOTP_DISABLED)."""
    if user.totp_enabled_at is None:
        raise Refused("The second step is not set up.", code="TOTP_DISABLED", fix="Set it up first.")
    await _check_password(view, user)
    await check_code(_authenticator(view), view.request, user, view.form.get("code", ""), "user.confirm")


async def _render_account(view: View, error: TimebellError | None = None) -> Response:
    user, codes_left = _user(view), 0
    if user.totp_enabled_at is not None:
        codes_left = await view.app.store.run(rows.count_recovery_codes, _keyring(view), user)
    status = 200 if error is None else 429 if isinstance(error, TooManySignIns) else 422
    return view.render(
        "account", status, user=user, codes_left=codes_left, problem=None if error is None else to_problem(error),
        passwords=view.app.settings.password_sign_in, min_length=passwords.MIN_LENGTH, max_length=passwords.MAX_LENGTH,
    )  # fmt: skip


def _render_enrollment(view: View, user: User, secret: str, error: TimebellError | None = None) -> Response:
    import segno  # only few requests need it

    url = totp.provisioning_url(secret, user.sign_in_name, ISSUER)
    return view.render(
        "totp", 200 if error is None else 422, problem=None if error is None else to_problem(error), url=url,
        secret=" ".join(secret[at : at + 4] for at in range(0, len(secret), 4)),
        qr_code=segno.make(url, error="m").svg_inline(scale=4, border=4, dark="#000", light="#fff"),
    )  # fmt: skip


async def _render_codes(view: View, user: User, codes: list[str]) -> Response:
    return await _keep_session(view, user, view.render("recovery_codes", codes=codes))


async def _keep_session(view: View, user: User, response: Response) -> Response:
    """Replace this browser's session, which the change has ended like all others of the user."""
    sessions: Sessions = view.request.app.state.sessions
    set_session_cookie(response, await sessions.renew(view.request, user))
    return response


def _record(tx: Transaction, view: View, user: User, action: str) -> None:
    caller = view.caller
    audit_log.write_record(tx, AuditRecord(
        id=new_id(view.now), tenant_id=user.tenant_id or DEFAULT_TENANT, at=view.now, actor=user.name,
        actor_kind="user", action=action, subject=user.name, address=caller.address, request_id=view.request.state.id,
    ))  # fmt: skip
