"""Tokens of an identity provider as credentials of API calls: roles, tenants, forgeries, outages and expiry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from joserfc.jwk import RSAKey

from tests.identity_provider import CLIENT_ID, ProviderStandIn, forged_tokens, identity_provider
from timebell.api import authentication
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.tenancy import identities, users
from timebell.tenancy.identities import Identity
from timebell.tenancy.roles import Role

from .web import NIGHTLY, Web, is_problem

Make = Callable[..., Any]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderStandIn]:
    with identity_provider(monkeypatch) as running:
        running.claims["groups"] = ["acme-ops"]
        yield running


async def sign_in(web: Web, provider: ProviderStandIn, name: str = "dana") -> None:
    """Create the user as the sign-in at the dashboard does."""
    await web.app.open()
    now = web.app.clock.now()
    identity = Identity(issuer=provider.issuer, subject="u-1", name=name, role=Role.OPERATOR, tenant_id="acme",
                        expires_at=now)  # fmt: skip
    await web.app.store.run(identities.sign_in_identity, identity, new_id(now), now)


async def test_a_token_acts_in_the_tenant_and_role_of_its_claims(make: Make, provider: ProviderStandIn) -> None:
    async with make(open_here=False) as web:
        operator = provider.token()
        assert (await web.get("/schedules", key=operator)).status_code == 200
        is_problem(await web.post("/schedules", NIGHTLY, key=operator), 403, "ROLE_TOO_LOW")
        is_problem(await web.get("/schedules?tenant=other", key=operator), 403, "TENANT_FORBIDDEN")
        is_problem(await web.get("/schedules", key=operator, timebell_tenant="default"), 403, "TENANT_FORBIDDEN")
        platform = provider.token(groups=["cn=sre,dc=example"])
        created = await web.post("/schedules?tenant=other", NIGHTLY, key=platform)
        assert created.status_code == 201
        assert (await web.get("/schedules", key=operator)).json()["items"] == []
        records = (await web.app.store.run(audit_log.list_records, "other", 5, None)).items
        assert [(one.action, one.actor, one.key_id) for one in records] == [("schedule.create", "dana", None)]


async def test_forged_tokens_are_refused_and_counted(make: Make, provider: ProviderStandIn) -> None:
    async with make(open_here=False) as web, web.app.running() as service:
        forged = forged_tokens(provider, groups=["acme-ops"])
        for what, token in forged.items():
            response = await web.get("/schedules", key=token)
            assert response.status_code == 401, what
            is_problem(response, 401, "UNAUTHORIZED")
        assert (await web.get("/schedules", key=provider.token())).status_code == 200
        counted = service.node.counters.authentication_failures.values
        assert counted["wrong_token",] == len(forged)
        assert len(provider.requests) <= 3  # unknown keys do not multiply requests to the provider


async def test_an_api_needs_tokens_for_its_own_audience(
    make: Make, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_OIDC_AUDIENCE", "https://timebell.example.com")
    async with make(open_here=False) as web:
        is_problem(await web.get("/schedules", key=provider.token(aud=CLIENT_ID)), 401, "UNAUTHORIZED")
        token = provider.token(aud=["https://timebell.example.com", "another"])
        assert (await web.get("/schedules", key=token)).status_code == 200


async def test_a_token_without_a_role_or_of_a_disabled_user_is_refused(
    make: Make, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "CACHE_SECONDS", -1.0)
    async with make(open_here=False) as web:
        is_problem(await web.get("/schedules", key=provider.token(groups=["people"])), 403, "NO_ROLE")
        await sign_in(web, provider, "dana of acme")
        token = provider.token()
        admin = await web.key("admin", "acme")
        assert (await web.get("/schedules", key=token)).status_code == 200
        assert (await web.ask("PATCH", "/users/dana of acme", {"enabled": False}, key=admin)).status_code == 200
        is_problem(await web.get("/schedules", key=token), 403, "USER_DISABLED")
        # Another identity with the name of a user could act in its name in the audit log.
        is_problem(
            await web.get("/schedules", key=provider.token(sub="u-2", preferred_username="dana of acme")),
            403, "USER_NAME_TAKEN",
        )  # fmt: skip


async def test_tokens_work_while_the_provider_is_down_if_its_keys_are_known(
    make: Make, provider: ProviderStandIn
) -> None:
    async with make(open_here=False) as web:
        provider.failing = {"/jwks"}
        is_problem(await web.get("/schedules", key=provider.token()), 503, "IDENTITY_PROVIDER_UNAVAILABLE")
        key = await web.key("viewer")
        assert (await web.get("/schedules", key=key)).status_code == 200
    async with make(open_here=False) as web:
        provider.failing = set()
        assert (await web.get("/schedules", key=provider.token())).status_code == 200
        provider.failing = {"/jwks", "/.well-known/openid-configuration"}
        assert (await web.get("/schedules", key=provider.token(sub="u-2"))).status_code == 200
        stranger = RSAKey.generate_key(2048, {"kid": "two"})
        flood = [provider.token(header={"kid": f"unknown-{n}"}, key=stranger) for n in range(20)]
        answers = await asyncio.gather(*(web.get("/schedules", key=token) for token in flood))
        assert {answer.status_code for answer in answers} == {401}


async def test_a_stream_ends_with_its_token_and_when_its_user_is_disabled(
    make: Make, provider: ProviderStandIn
) -> None:
    async with make(open_here=False) as web:
        await web.app.open()
        authenticator = web.site.authenticator
        await sign_in(web, provider)
        now = web.app.clock.now()
        identity = Identity(
            issuer=provider.issuer, subject="u-1", name="dana", role=Role.OPERATOR, tenant_id="acme", expires_at=now
        )
        expired = authentication.Caller("dana", "acme", Role.OPERATOR, "", identity=identity)
        caller = replace(expired, identity=replace(identity, expires_at=now + timedelta(hours=1)))
        assert not await authenticator.is_valid(expired)
        assert await authenticator.is_valid(caller)
        user = await web.app.store.run(users.find_user, "dana", "acme")
        await web.app.store.run(users.disable_user, user.id, now)
        assert not await authenticator.is_valid(caller)


async def test_users_show_their_provider_which_determines_role_and_password(
    make: Make, provider: ProviderStandIn
) -> None:
    async with make(open_here=False) as web:
        await sign_in(web, provider)
        admin = await web.key("admin", "acme")
        await web.post("/users", {"name": "root", "role": "admin", "password": "correct horse battery"}, key=admin)
        listed = (await web.get("/users", key=admin)).json()["items"]
        assert [(one["name"], one["issuer"]) for one in listed] == [("dana", provider.issuer), ("root", None)]
        for patch in ({"role": "viewer"}, {"password": "another good password"}):
            is_problem(await web.ask("PATCH", "/users/dana", patch, key=admin), 403, "MANAGED_BY_PROVIDER")
        assert (await web.ask("DELETE", "/users/dana", key=admin)).status_code == 200
        assert await web.app.store.run(users.find_user, "dana", "acme") is None
