"""HTTP client for dashboard tests without a real browser: opens pages and submits their forms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import httpx2

from tests.api.web import Web
from timebell import Timebell
from timebell.ids import new_id
from timebell.store.tenancy import users
from timebell.tenancy import passwords
from timebell.tenancy.roles import Role
from timebell.tenancy.users import User

PASSWORD = "correct horse battery"
COOKIE = "__Host-timebell"


class Tags(HTMLParser):
    """Tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def find_all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all tags of this name."""
        return [attributes for name, attributes in self.tags if name == tag]


@dataclass
class Browser:
    """Client that keeps cookies and sends the fetch metadata headers of a browser."""

    app: Timebell
    client: httpx2.AsyncClient
    site: Any

    @property
    def web(self) -> Web:
        """Client of the API of the same server."""
        return Web(self.app, self.client, self.site)

    async def create_user(self, name: str = "dana", role: str = "admin", tenant: str | None = "default") -> None:
        """Create a user with the password PASSWORD."""
        await self.app.open()
        now = self.app.clock.now()
        user = User(id=new_id(now), tenant_id=tenant, name=name, role=Role(role), created_at=now)
        await self.app.store.run(users.create_user, user, passwords.hash_password(PASSWORD))

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        """Request a page; redirects are not followed."""
        return await self.client.get(path, headers={name.replace("_", "-"): text for name, text in headers.items()})

    async def post_form(self, path: str, form: dict[str, str], **headers: str) -> httpx2.Response:
        """Post a form like a page of the dashboard; redirects are not followed. An empty header is omitted."""
        all_headers = {"sec_fetch_site": "same-origin"} | headers
        return await self.client.post(
            path, data=form, headers={name.replace("_", "-"): text for name, text in all_headers.items() if text}
        )

    async def submit(self, page: str, action: str, **fields: str) -> httpx2.Response:
        """Open a page, fill in its form with this `action`, and submit it."""
        html = (await self.get(page)).text
        token = re.search(r'name="_token" value="(\w+)"', html)
        assert token is not None, html
        assert f'action="{action}"' in html, f"{page} has no form for {action}"
        return await self.post_form(action, {"_token": token[1], **fields})

    async def sign_in(self, name: str = "dana", password: str = PASSWORD, **more: str) -> httpx2.Response:
        """Sign in with name and password."""
        return await self.post_form("/ui/sign-in", {"name": name, "password": password, **more})
