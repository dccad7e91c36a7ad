"""The API and the dashboard under a prefix of somebody's own application."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx2
from fastapi import FastAPI

from tests.api.web import SECRET, Web
from timebell import Timebell
from timebell.integrations.asgi import mounted

FORM = re.compile(r'name="_token" value="([^"]+)"')


async def test_every_address_on_a_page_is_under_the_prefix(sqlite_url: str) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    app.settings = replace(app.settings, secret_key=SECRET)
    outer = FastAPI()
    outer.mount("/bell", mounted(app))
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
            door = await client.get(f"{prefix}/ui/sign-in?next=%2Fui%2Fjobs")
            assert f'action="{prefix}/ui/sign-in"' in door.text
            same = {"origin": "https://shop.example", "sec-fetch-site": "same-origin"}
            ahead = re.search(r'name="next" value="([^"]+)"', door.text)
            assert ahead
            inside = await client.post(f"{prefix}/ui/sign-in", data={"key": key, "next": ahead[1]}, headers=same)
            assert (inside.status_code, inside.headers["location"]) == (303, f"{prefix}/ui/jobs")
            assert "path=/" in inside.headers["set-cookie"].lower()
            for path in ("/ui/", "/ui/jobs", "/ui/schedules", "/ui/nodes", "/ui/schedules/new", "/ui/nowhere"):
                page = await client.get(f"{prefix}{path}")
                assert int(page.headers["content-length"]) == len(page.content)
                named = re.findall(r'(?:href|action|src|hx-get|hx-post|hx-sse:connect)="(/[^"]*)"', page.text)
                assert named, path
                assert [one for one in named if not one.startswith(f"{prefix}/")] == [], path
            script = re.search(r'src="(/outer/bell/ui/static/timebell\.js[^"]*)"', page.text)
            assert script
            text = (await client.get(script[1])).text
            assert f"path={prefix}/ui;" in text
            assert '"/ui/' not in text
            job = (await app.list(owner_id="ana")).items[0]
            shown = await client.get(f"{prefix}/ui/jobs/{job.id}")
            assert "&#34;/ui/jobs" in shown.text or "&quot;/ui/jobs" in shown.text  # somebody's text stays as it is
            token = FORM.search(shown.text)
            assert token
            here = re.search(r'name="back" value="([^"]+)"', shown.text)
            assert here
            form = {"_token": token[1], "zone": "utc", "back": here[1]}
            back = await client.post(f"{prefix}/ui/shown", data=form, headers=same)
            assert back.headers["location"] == f"{prefix}/ui/jobs/{job.id}"
            gone = await client.post(f"{prefix}/ui/jobs/{job.id}/cancel", data={"_token": token[1]}, headers=same)
            assert gone.headers["location"].startswith(f"{prefix}/ui/jobs/{job.id}?did=")
            assert (await app.get(job.id)).state == "cancelled"
        finally:
            await app.close()
