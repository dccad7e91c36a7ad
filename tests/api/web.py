"""A client of the API, and the keys and bodies that its tests use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    """A served app and its client."""

    app: Timebell
    client: httpx2.AsyncClient
    site: Any

    async def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Any:
        """Send one request; underscores in header names become dashes."""
        sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent_headers["authorization"] = f"Bearer {key}"
        if isinstance(body, bytes):
            sent_headers.setdefault("content-type", "application/json")
            return await self.client.request(method, path, content=body, headers=sent_headers)
        if body is None:
            return await self.client.request(method, path, headers=sent_headers)
        return await self.client.request(method, path, json=body, headers=sent_headers)

    async def get(self, path: str, **more: Any) -> Any:
        """Send a GET request."""
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Any = None, **more: Any) -> Any:
        """Send a POST request."""
        return await self.ask("POST", path, body, **more)

    async def key(self, role: str = "admin", tenant: str | None = "default", **more: Any) -> str:
        """Write a key directly into the store and return its text."""
        await self.app.open()
        now = self.app.clock.now()
        id_, text = keys.generate_key()
        name = f"{role}-{new_id(now)[-4:]}"
        created = Key(id=id_, tenant_id=tenant, name=name, role=Role(role), created_at=now, **more)
        await self.app.store.run(key_rows.create_key, created, keys.digest(SECRET, text))
        return text


def is_problem(response: Any, status: int, code: str) -> dict[str, Any]:
    """Assert that a response is the expected RFC 9457 problem and return its body."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["code"]) == (status, code), body
    assert body["status"] == status
    assert body["detail"]
    assert body["requestId"] == response.headers["request-id"]
    return body


async def wait_until(condition: Callable[[], Any], seconds: float = 40) -> Any:
    """Poll a function or coroutine function until its result is true, and return the result.

    At growing intervals, because each request takes as much of the processor as several steps of the engine.
    """
    pause = 0.02
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            result = await result if asyncio.iscoroutine(result) else result
            if result:
                return result
            await asyncio.sleep(pause)
            pause = min(pause * 1.2, 0.2)
