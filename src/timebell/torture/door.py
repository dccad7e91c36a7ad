"""The HTTP API as the driver uses it: of whichever node, with an Idempotency-Key, so that all can be asked again."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import httpx2

from timebell.errors import Refused


class Door:
    """All nodes' APIs. What a node that is gone or struck answers is an OSError: nobody knows what came of it."""

    def __init__(self, ports: list[int], key: str, chance: Random) -> None:
        self._ports, self._chance = ports, chance
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"}, timeout=httpx2.Timeout(6.0, connect=2.0), trust_env=False
        )

    async def post(self, path: str, body: Mapping[str, Any], *, key: str, tenant: str) -> dict[str, Any]:
        """What it answers. Raises OSError; Refused for what it does not do."""
        port = self._chance.choice(self._ports)
        headers = {"Idempotency-Key": key, "Timebell-Tenant": tenant}
        try:
            answer = await self._client.post(f"http://127.0.0.1:{port}/api/v1{path}", json=dict(body), headers=headers)
        except (httpx2.HTTPError, AttributeError) as lost:  # anyio asks a socket that was closed for its peer
            raise OSError(f"{type(lost).__name__} at {port}") from lost
        if answer.status_code >= 500:
            raise OSError(f"{answer.status_code} {answer.text[:200]}")
        found: dict[str, Any] = answer.json()
        if answer.status_code >= 400:
            raise Refused(f"{answer.status_code} {found.get('detail')}", code=str(found.get("code")))
        return found

    async def close(self) -> None:
        """No more."""
        await self._client.aclose()
