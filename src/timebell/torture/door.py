"""The HTTP API as the driver uses it: of whichever node, with an Idempotency-Key, so that all can be asked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from timebell import http_client
from timebell.errors import Refused

WITHIN = 6.0  # seconds for an answer
MOST = 1024 * 1024  # bytes of it


class Door:
    """All nodes' APIs. What a node that is gone or struck answers is an OSError: nobody knows what came of it."""

    def __init__(self, ports: list[int], key: str, chance: Random) -> None:
        self._ports, self._key, self._chance = ports, key, chance

    async def post(self, path: str, body: Mapping[str, Any], *, key: str, tenant: str) -> dict[str, Any]:
        """What it answers. Raises OSError; Refused for what it does not do."""
        port = self._chance.choice(self._ports)
        headers = {
            "authorization": f"Bearer {self._key}", "content-type": "application/json", "idempotency-key": key,
            "timebell-tenant": tenant,
        }  # fmt: skip
        url = f"http://127.0.0.1:{port}/api/v1{path}"
        try:
            answer = await http_client.ask(
                "POST", url, headers, json.dumps(dict(body)).encode(), within=WITHIN, most=MOST
            )
        except http_client.WireError as lost:
            raise OSError(f"{type(lost).__name__} at {port}") from lost
        if answer.status >= 500:
            raise OSError(f"{answer.status} {answer.body[:200].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(answer.body)
        if answer.status >= 400:
            raise Refused(f"{answer.status} {found.get('detail')}", code=str(found.get("code")))
        return found
