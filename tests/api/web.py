"""What the tests of the API say to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2

from timebell import Timebell
from timebell.ids import new_id
from timebell.store.tenancy import api_keys as key_rows
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

SECRET = "a secret key of the tests, long enough"
NIGHTLY = {
    "name": "nightly", "cronExpression": "0 2 * * *", "timezone": "America/New_York", "jobType": "report.build",
    "jobPayload": {"kind": "daily"}, "maxRetries": 3, "timeoutSeconds": 3600, "overlapPolicy": "skip", "enabled": True,
}  # fmt: skip


@dataclass
class Web:
    """A served app and a client of it."""

    app: Timebell
    client: httpx2.AsyncClient
    site: Any

    async def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Any:
        """One request; header names with dashes for underscores."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            given["authorization"] = f"Bearer {key}"
        if isinstance(body, bytes):
            given.setdefault("content-type", "application/json")
            return await self.client.request(method, path, content=body, headers=given)
        if body is None:
            return await self.client.request(method, path, headers=given)
        return await self.client.request(method, path, json=body, headers=given)

    async def get(self, path: str, **more: Any) -> Any:
        """GET."""
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """POST."""
        return await self.ask("POST", path, body, **more)

    async def key(self, role: str = "admin", tenant: str | None = "default", **more: Any) -> str:
        """A key written straight into the store; its text."""
        await self.app.open()
        now = self.app.clock.now()
        id_, text = keys.mint()
        made = Key(id=id_, tenant_id=tenant, name=f"{role}-{new_id(now)[-4:]}", role=Role(role), created_at=now, **more)
        await self.app.store.run(key_rows.create, made, keys.digest(SECRET, text))
        return text


def is_problem(response: Any, status: int, code: str) -> dict[str, Any]:
    """Assert that this is the problem expected, as RFC 9457 wants it; its body."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["code"]) == (status, code), body
    assert body["status"] == status
    assert body["detail"]
    assert body["requestId"] == response.headers["request-id"]
    return body
