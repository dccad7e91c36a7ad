"""What the tests of pages do that need no real browser: look at pages, and send the forms that are in them."""

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
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all tags of this name."""
        return [given for name, given in self.tags if name == tag]


@dataclass
class Browser:
    """One that keeps cookies and says where its requests come from."""

    app: Timebell
    client: httpx2.AsyncClient
    site: Any

    @property
    def web(self) -> Web:
        """The API of the same server."""
        return Web(self.app, self.client, self.site)

    async def user(self, name: str = "dana", role: str = "admin", tenant: str | None = "default") -> None:
        """One who can sign in with PASSWORD."""
        await self.app.open()
        now = self.app.clock.now()
        made = User(id=new_id(now), tenant_id=tenant, name=name, role=Role(role), created_at=now)
        await self.app.store.run(users.create, made, passwords.stored(PASSWORD))

    async def look(self, path: str, **headers: str) -> httpx2.Response:
        """A page."""
        return await self.client.get(path, headers={name.replace("_", "-"): text for name, text in headers.items()})

    async def send(self, path: str, form: dict[str, str], **headers: str) -> httpx2.Response:
        """A form as a page of ours sends it; what it leads to is not followed."""
        given = {"sec_fetch_site": "same-origin"} | headers
        return await self.client.post(
            path, data=form, headers={name.replace("_", "-"): text for name, text in given.items() if text}
        )

    async def press(self, page: str, action: str, **fields: str) -> httpx2.Response:
        """Open a page, fill in the form that goes to `action`, and send it."""
        html = (await self.look(page)).text
        token = re.search(r'name="_token" value="(\w+)"', html)
        assert token is not None, html
        assert f'action="{action}"' in html, f"{page} has no form for {action}"
        return await self.send(action, {"_token": token[1], **fields})

    async def sign_in(self, name: str = "dana", password: str = PASSWORD, **more: str) -> httpx2.Response:
        """Sign in."""
        return await self.send("/ui/sign-in", {"name": name, "password": password, **more})
