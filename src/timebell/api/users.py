"""`/users`: dashboard users and their sessions. A caller cannot give a user more permissions than it has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Response
from pydantic import Field, SecretStr

from timebell.api.if_match import IfMatch, check_match, entity_tag
from timebell.api.keys import visible_tenant
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Id,
    Instant,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.client.validation import check_text
from timebell.errors import Refused
from timebell.ids import new_id
from timebell.store.tenancy import totp
from timebell.store.tenancy import users as rows
from timebell.tenancy import passwords
from timebell.tenancy.roles import Role, require
from timebell.tenancy.users import Session, User, check_managed_here, check_role_change, check_user_name

routes = APIRouter(route_class=ApiRoute, tags=["users"])
SESSION_ID_LENGTH = 16  # of the digest of the cookie; enough to tell sessions apart, not enough to look one up
UserCursor = Annotated[str | None, Query(max_length=240, description="nextCursor of the previous page.")]
Password = Annotated[SecretStr, Field(min_length=passwords.MIN_LENGTH, max_length=passwords.MAX_LENGTH)]


class UserIn(RequestBody):
    """Fields of a new user. The password has 12 to 200 characters."""

    name: Name
    role: Role
    password: Password


class UserPatch(RequestBody):
    """Changes of a user. A new password, or `enabled: false`, ends all sessions of the user."""

    role: Role | None = None
    enabled: bool | None = None
    password: Password | None = None


class UserOut(ResponseBody):
    """Dashboard user. `tenantId` is null for users of the platform."""

    id: str
    name: str
    tenant_id: str | None
    role: str
    issuer: Annotated[str | None, Field(description="Identity provider of the user; null: signs in with a password.")]
    enabled: bool
    totp_enabled_at: Annotated[
        Instant | None,
        Field(description="Since when a code of an authenticator app is required; null: never."),
    ]
    created_at: Instant
    created_by: str | None
    last_used_at: Annotated[Instant | None, Field(description="Last sign-in.")]


class UserPage(ResponseBody):
    """Page of users, sorted by name."""

    items: list[UserOut]
    next_cursor: str | None


class SessionOut(ResponseBody):
    """Session of a user: a signed-in browser."""

    id: str
    created_at: Instant
    last_used_at: Annotated[Instant, Field(description="Accurate to the minute.")]


class SessionList(ResponseBody):
    """Sessions of a user, newest first."""

    items: list[SessionOut]


class SessionsEnded(ResponseBody):
    """Number of sessions that were ended."""

    ended: int


@routes.post("/users", status_code=201, response_model=UserOut, **change_route("user.create", Role.ADMIN))
async def create_user(body: UserIn, ctx: Context) -> Response:
    """Create a user. Users with the role `platform` belong to no tenant, all others to the caller's tenant."""
    _check_permission(ctx, body.role)
    ctx.subject = check_user_name(check_text(body.name, "name"))
    user = User(
        id=new_id(ctx.now), tenant_id=None if body.role is Role.PLATFORM else ctx.tenant_id, name=ctx.subject,
        role=body.role, created_at=ctx.now, created_by=ctx.caller.actor,
    )  # fmt: skip
    await ctx.run(rows.create_user, user, await _hash(body.password))
    return _user_response(user, 201, {"Location": f"/api/v1/users/{quote(user.name, safe='')}"})


@routes.get("/users", response_model=UserPage, **read_route(Role.ADMIN))
async def list_users(ctx: Context, limit: Limit = 50, cursor: UserCursor = None) -> Response:
    """List the users of the tenant, including disabled ones. Platform keys list all users."""
    page = await ctx.run(rows.list_users, limit, cursor, visible_tenant(ctx))
    return page_response(page, [render_user(user) for user in page])


@routes.get("/users/{name}", response_model=UserOut, **read_route(Role.ADMIN))
async def get_user(name: Id, ctx: Context) -> Response:
    """Get a user."""
    return _user_response(await _find_user(ctx, name))


@routes.patch("/users/{name}", response_model=UserOut, **change_route("user.update", Role.ADMIN))
async def patch_user(name: Id, body: UserPatch, ctx: Context, if_match: IfMatch = None) -> Response:
    """Change the role or the password of a user, or disable or enable the user."""
    user = await _user_for_change(ctx, name, if_match)
    if body.role is not None and body.role is not user.role:
        _check_permission(ctx, body.role)
        check_role_change(user, body.role)
        await ctx.run(rows.set_role, user.id, body.role)
    if body.password is not None:
        check_managed_here(user)
        await ctx.run(rows.set_password, user.id, await _hash(body.password))
    if body.enabled is not None:
        await ctx.run(rows.enable_user if body.enabled else rows.disable_user, user.id, ctx.now)
    return _user_response(await _find_user(ctx, name))


@routes.delete("/users/{name}", response_model=UserOut, **change_route("user.delete", Role.ADMIN))
async def delete_user(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a user and end all sessions of the user. The audit log keeps the name."""
    user = await _user_for_change(ctx, name, if_match)
    await ctx.run(rows.delete_user, user.id)
    return json_response(render_user(user))


@routes.delete("/users/{name}/totp", response_model=UserOut, **change_route("user.reset_totp", Role.ADMIN))
async def reset_user_totp(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Let a user who has lost the authenticator app sign in with the password alone. Ends all sessions of the user."""
    user = await _user_for_change(ctx, name, if_match)
    await ctx.run(totp.remove_totp, user.id)
    return _user_response(await _find_user(ctx, name))


@routes.get("/users/{name}/sessions", response_model=SessionList, **read_route(Role.ADMIN))
async def list_user_sessions(name: Id, ctx: Context) -> Response:
    """List the sessions of a user, newest first."""
    user = await _find_user(ctx, name)
    sessions: list[Session] = await ctx.run(rows.list_sessions, user.id, ctx.now)
    return json_response({"items": [_render_session(session) for session in sessions]})


@routes.delete("/users/{name}/sessions", response_model=SessionsEnded, **change_route("user.end_sessions", Role.ADMIN))
async def end_user_sessions(name: Id, ctx: Context) -> Response:
    """End all sessions of a user."""
    user = await _user_for_change(ctx, name)
    return json_response({"ended": await ctx.run(rows.end_sessions, user.id)})


@routes.delete(
    "/users/{name}/sessions/{id}", response_model=SessionsEnded, **change_route("user.end_session", Role.ADMIN)
)
async def end_user_session(name: Id, id: Id, ctx: Context) -> Response:
    """End one session of a user."""
    user = await _user_for_change(ctx, name)
    sessions: list[Session] = await ctx.run(rows.list_sessions, user.id, ctx.now)
    ended = [session.id for session in sessions if session.id[:SESSION_ID_LENGTH] == id]
    if not ended:
        raise not_found("session", id)
    await ctx.run(rows.delete_session, ended[0])
    return json_response({"ended": 1})


async def _hash(password: SecretStr) -> str:
    return await asyncio.to_thread(passwords.hash_password, password.get_secret_value())


async def _find_user(ctx: Context, name: str, *, lock: bool = False) -> User:
    user: User | None = await ctx.run(rows.find_user, name, ctx.tenant_id, lock=lock)
    if user is None or visible_tenant(ctx) not in (None, user.tenant_id):
        raise not_found("user", name)
    return user


async def _user_for_change(ctx: Context, name: str, if_match: str | None = None) -> User:
    """Lock a user that the caller may change, check If-Match, and record the user as the audit subject.

    Raises NotFound, Refused, RevisionStale.
    """
    user = await _find_user(ctx, name, lock=True)
    _check_permission(ctx, user.role)
    check_match(if_match, etag(user), f"The user {name!r:.80}", name)
    ctx.subject, ctx.before = user.name, render_user(user)
    return user


def etag(user: User) -> str:
    """Return the strong ETag of a user: role, state and second step."""
    return entity_tag(0, user.id, user.role, user.disabled_at, user.totp_enabled_at)


def _user_response(user: User, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(render_user(user), status, {"ETag": etag(user), **(headers or {})})


def _check_permission(ctx: Context, role: Role) -> None:
    """Check that the caller may manage users of a role. Raises Refused (ROLE_TOO_LOW, KEY_EXCEEDS_CALLER)."""
    require(ctx.caller.role, role)
    key = ctx.caller.key
    if key is not None and (key.scopes, key.networks, key.expires_at) != (None, None, None):
        raise Refused(
            "A user has no scopes, networks or expiry: a restricted key cannot manage users.",
            code="KEY_EXCEEDS_CALLER", fix="Use a key without restrictions.",
        )  # fmt: skip


def render_user(user: User) -> dict[str, Any]:
    """Render a user as JSON."""
    return {
        "id": user.id, "name": user.name, "tenantId": user.tenant_id, "role": user.role.value,
        "issuer": user.issuer, "enabled": user.disabled_at is None,
        "totpEnabledAt": format_utc(user.totp_enabled_at), "createdAt": format_utc(user.created_at),
        "createdBy": user.created_by, "lastUsedAt": format_utc(user.last_used_at),
    }  # fmt: skip


def _render_session(session: Session) -> dict[str, Any]:
    return {
        "id": session.id[:SESSION_ID_LENGTH], "createdAt": format_utc(session.created_at),
        "lastUsedAt": format_utc(session.seen_at),
    }  # fmt: skip
