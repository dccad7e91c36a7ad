"""Sign-in at an identity provider: protocol, roles and tenants, forgeries, outages and sign-out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import httpx2
import pytest
from joserfc.jwk import ECKey

from tests.identity_provider import CLIENT_ID, OWN_URL, ProviderStandIn, forged_tokens, identity_provider
from timebell import Timebell
from timebell.api import provider_cache
from timebell.clock import VirtualClock
from timebell.errors import InvalidInput, StoreUnreachable
from timebell.store.audit import audit_log
from timebell.store.tenancy import users

from .browser import COOKIE, Browser
from .test_sign_in import OUTSIDE_PATHS, START

ATTEMPT_COOKIE = "__Host-timebell-sign-in"
Serve = Callable[..., Any]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderStandIn]:
    with identity_provider(monkeypatch) as running:
        running.claims["groups"] = ["people", "admins"]
        yield running


@asynccontextmanager
async def served(serve: Serve, provider: ProviderStandIn) -> AsyncIterator[Browser]:
    clock = VirtualClock(START)
    provider.now = clock.now
    async with serve(clock=clock) as browser:
        yield browser


async def start(browser: Browser, next: str = "/ui/") -> str:
    """Follow the link of the sign-in page; return the URL of the provider."""
    response = await browser.get(f"/ui/sign-in/start?next={quote(next, safe='')}")
    assert response.status_code == 303, response.text
    return str(response.headers["location"])


async def sign_in(browser: Browser, provider: ProviderStandIn, **changes: str | None) -> httpx2.Response:
    return await browser.get(provider.authorize(await start(browser), **changes))


def reason_of(response: httpx2.Response) -> str:
    """Return the code of the problem on a page."""
    found = re.search(r'<div class="hint mono">\s*(\w+)', response.text)
    assert found, response.text
    return found[1]


async def test_a_user_signs_in_with_the_role_of_a_group(serve: Serve, provider: ProviderStandIn) -> None:
    async with served(serve, provider) as browser:
        page = (await browser.get("/ui/sign-in?next=%2Fui%2Fruns%3Fq%3Dx")).text
        link = re.search(r'href="(/ui/sign-in/start[^"]+)">Sign in at 127.0.0.1<', page)
        assert link, page
        url = (await browser.get(link[1])).headers["location"]
        asked = dict(parse_qsl(urlsplit(url).query))
        assert asked["scope"] == "openid profile email"
        assert len({asked["state"], asked["nonce"], asked["code_challenge"]}) == 3
        assert min(map(len, (asked["state"], asked["nonce"], asked["code_challenge"]))) == 43
        signed_in = await browser.get(provider.authorize(url))
        assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/ui/runs?q=x")
        cookie = next(value for value in signed_in.headers.get_list("set-cookie") if value.startswith(f"{COOKIE}="))
        for flag in ("Secure", "HttpOnly", "SameSite=lax", "Path=/"):
            assert flag in cookie
        assert "dana, admin" in (await browser.get("/ui/")).text
        page = (await browser.get("/ui/users/dana")).text
        assert provider.issuer in page
        assert "/ui/users/dana/role" not in page  # the provider determines it
        [user] = (await browser.app.store.run(users.list_users, 10, None)).items
        assert (user.name, user.tenant_id, user.issuer, user.subject) == ("dana", "default", provider.issuer, "u-1")
        assert len(await browser.app.store.run(users.list_sessions, user.id, browser.app.clock.now())) == 1
        records = (await browser.app.store.run(audit_log.list_records, "default", 5, None)).items
        assert {(one.action, one.actor) for one in records} == {
            ("user.create", "identity provider"), ("session.begin", "dana"),
        }  # fmt: skip
        await browser.app.store.run(users.end_sessions, user.id)
        assert (await browser.get("/ui/")).status_code == 303


async def test_another_node_finishes_a_sign_in(serve_sqlite: Serve, provider: ProviderStandIn) -> None:
    async with served(serve_sqlite, provider) as one, served(serve_sqlite, provider) as other:
        callback = provider.authorize(await start(one))
        other.client.cookies = one.client.cookies
        assert (await other.get(callback)).status_code == 303
        one.client.cookies = other.client.cookies
        assert "dana, admin" in (await one.get("/ui/")).text


async def test_role_and_tenant_are_those_of_the_latest_sign_in(serve: Serve, provider: ProviderStandIn) -> None:
    async with served(serve, provider) as browser:
        await sign_in(browser, provider)
        provider.claims |= {"groups": ["acme-ops"], "preferred_username": "dana.new"}
        await sign_in(browser, provider)
        page = (await browser.get("/ui/")).text
        assert "dana, operator" in page  # the audit log keeps the name of the first sign-in
        assert "Tenant acme" in page
        provider.claims["groups"] = ["cn=sre,dc=example", "acme-ops"]
        await sign_in(browser, provider)
        assert "dana, operator" in (await browser.get("/ui/")).text  # the first entry of the map counts
        provider.claims["groups"] = "cn=sre,dc=example"
        await sign_in(browser, provider)
        assert "dana, platform" in (await browser.get("/ui/")).text
        assert len((await browser.app.store.run(users.list_users, 10, None)).items) == 1


async def test_a_user_without_a_role_is_refused_and_loses_open_sessions(
    serve: Serve, provider: ProviderStandIn
) -> None:
    async with served(serve, provider) as browser:
        await sign_in(browser, provider)
        session = browser.client.cookies[COOKIE]
        for groups in ([], ["people"], ["admin"], ["ADMINS"], {"admins": True}, None):
            provider.claims["groups"] = groups
            browser.client.cookies.clear()
            refused = await sign_in(browser, provider)
            assert (refused.status_code, reason_of(refused)) == (403, "NO_ROLE")
            assert COOKIE not in browser.client.cookies
        assert "dana has no role here" in refused.text
        records = (await browser.app.store.run(audit_log.list_records, "default", 20, None)).items
        assert any((one.action, one.outcome, one.code) == ("session.begin", "refused", "NO_ROLE") for one in records)
        browser.client.cookies.set(COOKIE, session, domain="127.0.0.1")
        assert (await browser.get("/ui/")).status_code == 303


async def test_an_identity_never_takes_over_the_user_of_the_same_name(serve: Serve, provider: ProviderStandIn) -> None:
    async with served(serve, provider) as browser:
        await browser.create_user("dana", "viewer")
        refused = await sign_in(browser, provider)
        assert (refused.status_code, reason_of(refused)) == (403, "USER_NAME_TAKEN")
        provider.claims["preferred_username"] = "dana@example.com"
        assert (await sign_in(browser, provider)).status_code == 303
        provider.claims["sub"] = "u-2"
        assert reason_of(await sign_in(browser, provider)) == "USER_NAME_TAKEN"
        assert (await browser.sign_in("dana@example.com", "")).status_code == 401  # it has no password


async def test_a_disabled_user_stays_out(serve: Serve, provider: ProviderStandIn) -> None:
    async with served(serve, provider) as browser:
        await sign_in(browser, provider)
        user = await browser.app.store.run(users.find_user, "dana")
        await browser.app.store.run(users.disable_user, user.id, browser.app.clock.now())
        refused = await sign_in(browser, provider)
        assert (refused.status_code, reason_of(refused)) == (403, "USER_DISABLED")


async def test_names_and_nested_roles_come_from_other_claims(
    serve_sqlite: Serve, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_OIDC_ROLE_CLAIM", "realm.roles")
    async with served(serve_sqlite, provider) as browser:
        provider.claims = {"sub": "u-1", "preferred_username": "bad\0name", "realm": {"roles": ["admins"]}}
        await sign_in(browser, provider)
        assert "u-1, admin" in (await browser.get("/ui/")).text
        for name in ("command line", "eve\u202emada", "", 7):
            provider.claims = {"sub": "u-2", "email": "eve@example.com", "realm.roles": ["acme-ops"]}
            provider.claims["preferred_username"] = name
            await sign_in(browser, provider)
            assert "eve@example.com, operator" in (await browser.get("/ui/")).text


async def test_claims_that_the_id_token_lacks_come_from_the_user_info(
    serve_sqlite: Serve, provider: ProviderStandIn
) -> None:
    async with served(serve_sqlite, provider) as browser:
        provider.claims = {"sub": "u-1"}
        provider.user_info = {"groups": ["admins"], "preferred_username": "dana", "sub": "u-2"}
        assert reason_of(await sign_in(browser, provider)) == "SIGN_IN_FAILED"  # of somebody else
        provider.user_info["sub"] = "u-1"
        assert (await sign_in(browser, provider)).status_code == 303
        assert "dana, admin" in (await browser.get("/ui/")).text


async def test_a_response_of_another_sign_in_is_refused(
    serve_sqlite: Serve, provider: ProviderStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(serve_sqlite, provider) as browser:
        callback = provider.authorize(await start(browser))
        finished = dict(browser.client.cookies)[ATTEMPT_COOKIE]
        assert (await browser.get(callback)).status_code == 303
        assert ATTEMPT_COOKIE not in browser.client.cookies
        again = await browser.get(callback)
        assert (again.status_code, reason_of(again)) == (401, "SIGN_IN_FAILED")
        browser.client.cookies.set(ATTEMPT_COOKIE, finished, domain="127.0.0.1")
        assert reason_of(await browser.get(callback)) == "SIGN_IN_FAILED"  # the provider redeems a code once
        assert "invalid_grant" in caplog.text
        # The code of an attacker, in the browser of a victim that has begun a sign-in of its own.
        attackers = provider.authorize(await start(browser))
        await start(browser)
        assert reason_of(await browser.get(attackers)) == "SIGN_IN_FAILED"
        assert "the state belongs to no sign-in" in caplog.text
        for _ in range(10):  # links of other sites, which must not use up the sign-ins of this address
            await browser.get("/ui/sign-in/callback?state=x&code=y")
        assert (await sign_in(browser, provider)).status_code == 303


@pytest.mark.parametrize(
    "changes",
    [{"state": None}, {"state": ""}, {"state": "é"}, {"iss": None}, {"iss": "https://evil.example"}, {"iss": ""},
     {"code": None}, {"code": "invented"}, {"code": None, "error": "access_denied<b>"}],
    ids=str,
)  # fmt: skip
async def test_changed_responses_are_refused(
    serve_sqlite: Serve, provider: ProviderStandIn, changes: dict[str, str | None]
) -> None:
    async with served(serve_sqlite, provider) as browser:
        refused = await sign_in(browser, provider, **changes)
        assert (refused.status_code, reason_of(refused)) == (401, "SIGN_IN_FAILED")
        assert "evil" not in refused.text
        assert "access_denied" not in refused.text
        assert COOKIE not in browser.client.cookies


async def test_forged_id_tokens_are_refused(
    serve_sqlite: Serve, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timebell.api.authentication_failures.MAX_SIGN_INS_PER_MINUTE", 1000)
    async with served(serve_sqlite, provider) as browser:
        url = await start(browser)
        nonce = dict(parse_qsl(urlsplit(url).query))["nonce"]
        attempt = browser.client.cookies[ATTEMPT_COOKIE]
        forged = forged_tokens(provider, nonce=nonce) | {
            "another nonce": provider.token(nonce="x" * 43), "no nonce": provider.token(),
            "for several clients": provider.token(nonce=nonce, aud=[CLIENT_ID, "another"], azp="another"),
        }  # fmt: skip
        for what, token in {**forged, "valid": provider.token(nonce=nonce)}.items():
            provider.id_token = token
            browser.client.cookies.set(ATTEMPT_COOKIE, attempt, domain="127.0.0.1")
            response = await browser.get(provider.authorize(url))
            expected = (303, "/ui/") if what == "valid" else (401, None)
            assert (response.status_code, response.headers.get("location")) == expected, what


async def test_sign_in_never_leads_to_other_sites(serve_sqlite: Serve, provider: ProviderStandIn) -> None:
    async with served(serve_sqlite, provider) as browser:
        for path in (*OUTSIDE_PATHS, "/ui/" + "x" * 3000):
            response = await browser.get(provider.authorize(await start(browser, path)))
            assert response.headers["location"] == "/ui/"
            planted = browser.client.cookies
            await start(browser)
            secret = planted[ATTEMPT_COOKIE].partition(".")[0]
            url = await start(browser)
            assert secret not in url


async def test_a_planted_cookie_cannot_choose_the_next_page(serve_sqlite: Serve, provider: ProviderStandIn) -> None:
    async with served(serve_sqlite, provider) as browser:
        for suffix in ("https%3A%2F%2Fevil.example", "%2F%2Fevil", "%FF", "%2Fui%2F%5Cevil", ""):
            url = await start(browser)
            secret = browser.client.cookies[ATTEMPT_COOKIE].partition(".")[0]
            browser.client.cookies.clear()
            browser.client.cookies.set(ATTEMPT_COOKIE, f"{secret}.{suffix}", domain="127.0.0.1")
            assert (await browser.get(provider.authorize(url))).headers["location"] == "/ui/"


async def test_failed_sign_ins_are_limited_by_address(serve_sqlite: Serve, provider: ProviderStandIn) -> None:
    async with served(serve_sqlite, provider) as browser:
        statuses = []
        for _ in range(12):
            url = await start(browser)
            statuses.append((await browser.get(provider.authorize(url, code="guess"))).status_code)
        assert statuses == [401] * 10 + [429] * 2
        assert provider.requests.count("/token") == 10


async def test_an_outage_of_the_database_is_explained_without_details(
    serve_sqlite: Serve, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StoreUnreachable("db.internal does not answer")

    async with served(serve_sqlite, provider) as browser:
        url = await start(browser)
        monkeypatch.setattr(browser.app.store, "run", fail)
        page = await browser.get(provider.authorize(url))
        assert (page.status_code, reason_of(page)) == (503, "DATABASE_UNREACHABLE")
        assert "db.internal" not in page.text
        page = await browser.sign_in()
        assert (page.status_code, reason_of(page)) == (503, "DATABASE_UNREACHABLE")
        assert "db.internal" not in page.text


async def test_refused_users_and_outages_do_not_lock_an_address(serve_sqlite: Serve, provider: ProviderStandIn) -> None:
    async with served(serve_sqlite, provider) as browser:
        await browser.create_user("root")
        await start(browser)
        provider.claims["groups"] = []
        assert {(await sign_in(browser, provider)).status_code for _ in range(6)} == {403}
        provider.failing = {"/token"}
        assert {(await sign_in(browser, provider)).status_code for _ in range(6)} == {503}
        assert (await browser.sign_in("root")).status_code == 303


async def test_while_the_provider_is_down_passwords_work(
    serve_sqlite: Serve, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.failing = {"/.well-known/openid-configuration"}
    async with served(serve_sqlite, provider) as browser:
        await browser.create_user("root")
        for _ in range(5):
            page = await browser.get("/ui/sign-in/start")
            assert (page.status_code, reason_of(page)) == (503, "IDENTITY_PROVIDER_UNAVAILABLE")
            assert provider.issuer not in page.text
        assert len(provider.requests) == 1  # requests do not multiply against a provider that is down
        assert (await browser.sign_in("root")).status_code == 303
        provider.failing = {"/token"}
        at = browser.app.clock.monotonic() + provider_cache.REFETCH_INTERVAL_SECONDS
        monkeypatch.setattr(VirtualClock, "monotonic", lambda _: at)
        response = await sign_in(browser, provider)
        assert (response.status_code, reason_of(response)) == (503, "IDENTITY_PROVIDER_UNAVAILABLE")
        provider.failing = set()
        assert (await sign_in(browser, provider)).status_code == 303


@pytest.mark.parametrize(
    "change",
    [{"issuer": "https://evil.example"}, {"token_endpoint": "http://evil.example/token"}, {"jwks_uri": None},
     {"authorization_endpoint": "javascript:alert(1)"}, {"end_session_endpoint": "http://[", "issuer": None}],
    ids=str,
)  # fmt: skip
async def test_a_provider_that_is_not_the_issuer_or_not_secure_is_refused(
    serve_sqlite: Serve, provider: ProviderStandIn, change: dict[str, Any]
) -> None:
    provider.configuration = change
    async with served(serve_sqlite, provider) as browser:
        assert reason_of(await browser.get("/ui/sign-in/start")) == "IDENTITY_PROVIDER_UNAVAILABLE"


async def test_new_keys_of_the_provider_are_fetched_and_old_ones_forgotten(
    serve_sqlite: Serve, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(serve_sqlite, provider) as browser:
        assert (await sign_in(browser, provider)).status_code == 303
        withdrawn = provider.keys.pop("one")
        provider.keys["two"] = ECKey.generate_key("P-256", {"kid": "two"})
        started = browser.app.clock.monotonic()
        assert (await sign_in(browser, provider)).status_code == 401  # fetched a moment ago
        monkeypatch.setattr(VirtualClock, "monotonic", lambda _: started + 11)
        assert (await sign_in(browser, provider)).status_code == 303
        monkeypatch.setattr(VirtualClock, "monotonic", lambda _: started + 22)
        url = await start(browser)
        nonce = dict(parse_qsl(urlsplit(url).query))["nonce"]
        provider.id_token = provider.token(header={"kid": "one", "alg": "RS256"}, key=withdrawn, nonce=nonce)
        assert (await browser.get(provider.authorize(url))).status_code == 401


async def test_signing_out_ends_the_session_at_the_provider(serve_sqlite: Serve, provider: ProviderStandIn) -> None:
    async with served(serve_sqlite, provider) as browser:
        await sign_in(browser, provider)
        session = browser.client.cookies[COOKIE]
        page = await browser.submit("/ui/", "/ui/sign-out")
        assert page.status_code == 200
        refresh = re.search(r'<meta http-equiv="refresh" content="0; url=([^"]+)">', page.text)
        assert refresh
        url = urlsplit(refresh[1].replace("&amp;", "&"))
        assert dict(parse_qsl(url.query)) == {
            "client_id": CLIENT_ID, "post_logout_redirect_uri": f"{OWN_URL}/ui/sign-in",
        }  # fmt: skip
        browser.client.cookies.set(COOKIE, session, domain="127.0.0.1")
        assert (await browser.get("/ui/")).status_code == 303
        await browser.create_user("root")  # whose session the provider does not know
        await browser.sign_in("root")
        assert (await browser.submit("/ui/", "/ui/sign-out")).status_code == 303


async def test_passwords_can_be_switched_off(
    serve_sqlite: Serve, provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_PASSWORD_SIGN_IN", "false")
    async with served(serve_sqlite, provider) as browser:
        await browser.create_user("root")
        page = (await browser.get("/ui/sign-in")).text
        assert 'name="password"' not in page
        assert 'name="key"' in page
        refused = await browser.sign_in("root")
        assert (refused.status_code, reason_of(refused)) == (401, "PASSWORDS_DISABLED")
        key = await browser.web.key("operator")
        assert (await browser.post_form("/ui/sign-in", {"key": key})).status_code == 303
        assert (await sign_in(browser, provider)).status_code == 303


async def test_without_a_provider_its_pages_say_so(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        assert "/ui/sign-in/start" not in (await browser.get("/ui/sign-in")).text
        for path in ("start", "callback?code=x&state=y"):
            page = await browser.get(f"/ui/sign-in/{path}")
            assert (page.status_code, reason_of(page)) == (404, "IDENTITY_PROVIDER_MISSING")


async def test_in_development_the_provider_may_send_the_browser_back(
    serve_sqlite: Serve, provider: ProviderStandIn
) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        callback = provider.authorize(await start(browser))
        response = await browser.get(callback, sec_fetch_site="cross-site")
        assert (response.status_code, response.headers["location"]) == (303, "/ui/")
        assert "dana, admin" in (await browser.get("/ui/", sec_fetch_site="cross-site")).text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OIDC_ISSUER", "http://login.example.com"), ("OIDC_ISSUER", "login.example.com"),
        ("OIDC_ISSUER", "https://login.example.com/?x=1"), ("OIDC_ISSUER", "https://[::1"),
        ("OIDC_ISSUER", "https://login.example.com/" + "x" * 200), ("OIDC_CLIENT_ID", ""), ("OIDC_ROLE_MAP", ""),
        ("OIDC_ROLE_MAP", "admins"), ("OIDC_ROLE_MAP", "admins=root"), ("OIDC_ROLE_MAP", "=admin"),
        ("OIDC_ROLE_MAP", "sre=platform@acme"), ("OIDC_ROLE_MAP", "ops=operator@"), ("OIDC_SCOPES", "profile"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_at_the_start(
    provider: ProviderStandIn, monkeypatch: pytest.MonkeyPatch, sqlite_url: str, name: str, value: str
) -> None:
    from timebell.api.authentication import Authenticator

    monkeypatch.setenv(f"TIMEBELL_{name}", value)
    with pytest.raises(InvalidInput, match=f"TIMEBELL_{name}") as refused:
        Authenticator(Timebell(sqlite_url), allow_local=False)
    assert refused.value.code == "INVALID_SETTING"
