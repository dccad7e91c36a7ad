"""The HTTP API as the driver and the remote workers use it: any node, with requests that can be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from timebell import http_client
from timebell.errors import Refused

TIMEOUT_SECONDS = 6.0
MAX_RESPONSE_BYTES = 1024 * 1024


class ServerError(OSError):
    """The node answered with status 500: an error that it does not know."""


class NodeApiClient:
    """Client for the APIs of all nodes.

    An unreachable or failing node raises OSError: the request may or may not have been executed.
    """

    def __init__(self, ports: list[int], key: str, rng: Random) -> None:
        self._ports, self._key, self._chance = ports, key, rng

    async def post(
        self, path: str, body: Mapping[str, Any], *, key: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Send a request to a random node; return the decoded response.

        `key` is the Idempotency-Key, `tenant` the tenant that a platform key acts for. Raises OSError, for a status of
        500 ServerError; Refused for a status of 4xx.
        """
        port = self._chance.choice(self._ports)
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        if key is not None:
            headers["idempotency-key"] = key
        if tenant is not None:
            headers["timebell-tenant"] = tenant
        url = f"http://127.0.0.1:{port}/api/v1{path}"
        try:
            response = await http_client.send_request(
                "POST",
                url,
                headers,
                json.dumps(dict(body)).encode(),
                timeout=TIMEOUT_SECONDS,
                max_bytes=MAX_RESPONSE_BYTES,
            )
        except http_client.HttpClientError as error:
            raise OSError(f"{type(error).__name__} at {port}") from error
        if response.status >= 500:
            kind = ServerError if response.status == 500 else OSError
            raise kind(f"{response.status} {response.body[:200].decode(errors='replace')}")
        document: dict[str, Any] = json.loads(response.body)
        if response.status >= 400:
            raise Refused(f"{response.status} {document.get('detail')}", code=str(document.get("code")))
        return document
