"""API and dashboard mounted under a prefix of another application."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx2
import pytest
from fastapi import FastAPI

from tests import identity_provider
from tests.api.web import SECRET, Web
from timebell import Timebell
from timebell.integrations.asgi import asgi_app

from .test_provider_sign_in import provider as provider

FORM = re.compile(r'name="_token" value="([^"]+)"')


async def test_all_urls_on_pages_start_with_the_prefix(sqlite_url: str) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    app.settings = replace(app.settings, secret_key=SECRET)
    outer = FastAPI()
    outer.mount("/bell", asgi_app(app))
    prefix = "/outer/bell"
    transport = httpx2.ASGITransport(app=outer, client=("127.0.0.1", 50_000), root_path="/outer")
    async with httpx2.AsyncClient(transport=transport, base_url="https://shop.example") as client:
        web = Web(app, client, outer)
        key = await web.key("admin")
        await app.schedule_at("mail.send", "2198-01-01T00:00", payload={"text": '"/ui/jobs'}, owner_id="ana")
        try:
            assert (await web.get(f"{prefix}/api/v1/jobs", key=key)).json()["items"][0]["topic"] == "mail.send"
            first = await client.get(f"{prefix}/")
            assert first.headers["location"] == f"{prefix}/ui/sign-in?next=%2F"
            assert (await client.get(f"{prefix}/ui/jobs")).headers["location"].startswith(f"{prefix}/ui/sign-in?next=")
            sign_in = await client.get(f"{prefix}/ui/sign-in?next=%2Fui%2Fjobs")
            assert f'action="{prefix}/ui/sign-in"' in sign_in.text
            same_origin = {"origin": "https://shop.example", "sec-fetch-site": "same-origin"}
            next_path = re.search(r'name="next" value="([^"]+)"', sign_in.text)
            assert next_path
            signed_in = await client.post(
                f"{prefix}/ui/sign-in", data={"key": key, "next": next_path[1]}, headers=same_origin
            )
            assert (signed_in.status_code, signed_in.headers["location"]) == (303, f"{prefix}/ui/jobs")
            assert "path=/" in signed_in.headers["set-cookie"].lower()
            for path in ("/ui/", "/ui/jobs", "/ui/schedules", "/ui/nodes", "/ui/schedules/new", "/ui/nowhere"):
                page = await client.get(f"{prefix}{path}")
                assert int(page.headers["content-length"]) == len(page.content)
                urls = re.findall(r'(?:href|action|src|hx-get|hx-post|hx-sse:connect)="(/[^"]*)"', page.text)
                assert urls, path
                assert [url for url in urls if not url.startswith(f"{prefix}/")] == [], path
            script = re.search(r'src="(/outer/bell/ui/static/timebell\.js[^"]*)"', page.text)
            assert script
            text = (await client.get(script[1])).text
            assert f"path={prefix}/ui;" in text
            assert '"/ui/' not in text
            job = (await app.list(owner_id="ana")).items[0]
            shown = await client.get(f"{prefix}/ui/jobs/{job.id}")
            assert "&#34;/ui/jobs" in shown.text or "&quot;/ui/jobs" in shown.text  # text of users is not rewritten
            token = FORM.search(shown.text)
            assert token
            back_path = re.search(r'name="back" value="([^"]+)"', shown.text)
            assert back_path
            form = {"_token": token[1], "zone": "utc", "back": back_path[1]}
            back = await client.post(f"{prefix}/ui/shown", data=form, headers=same_origin)
            assert back.headers["location"] == f"{prefix}/ui/jobs/{job.id}"
            cancelled = await client.post(
                f"{prefix}/ui/jobs/{job.id}/cancel", data={"_token": token[1]}, headers=same_origin
            )
            assert cancelled.headers["location"].startswith(f"{prefix}/ui/jobs/{job.id}?did=")
            assert (await app.get(job.id)).state == "cancelled"
        finally:
            await app.close()


async def test_single_sign_on_returns_to_the_prefix(
    sqlite_url: str, provider: identity_provider.ProviderStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_url = "https://shop.example/outer/bell"
    monkeypatch.setenv("TIMEBELL_URL", own_url)
    monkeypatch.setattr(identity_provider, "OWN_URL", own_url)
    app = Timebell(sqlite_url, timezone="UTC")
    app.settings = replace(app.settings, secret_key=SECRET)
    outer = FastAPI()
    outer.mount("/bell", asgi_app(app))
    transport = httpx2.ASGITransport(app=outer, client=("127.0.0.1", 50_000), root_path="/outer")
    async with httpx2.AsyncClient(transport=transport, base_url="https://shop.example") as client:
        page = (await client.get("/outer/bell/ui/sign-in?next=%2Fui%2Fjobs")).text
        link = re.search(r'href="(/outer/bell/ui/sign-in/start[^"]+)"', page)
        assert link, page
        started = await client.get(link[1])
        response = await client.get("/outer/bell" + provider.authorize(started.headers["location"]))
        assert (response.status_code, response.headers["location"]) == (303, "/outer/bell/ui/jobs")
        assert "dana, admin" in (await client.get("/outer/bell/ui/jobs")).text
    await app.close()
