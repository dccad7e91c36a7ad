"""A request of the target `http`, and its description for the test of a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from timebell.http_client import HttpResponse
from timebell.model.target import mask_secrets
from timebell.targets.address import Endpoint
from timebell.targets.base import decode_text
from timebell.targets.http_connections import Channel


@dataclass(slots=True)
class HttpRequest:
    """A request to send. `response` is the last response, `secrets` are generated values to mask."""

    tenant_id: str
    method: str
    endpoint: Endpoint
    headers: dict[str, str]
    body: bytes
    channel: Channel
    response: HttpResponse | None = None
    result: dict[str, Any] | None = None
    """The result of the outcome, with the body of the response."""
    secrets: set[str] = field(default_factory=set)

    @property
    def sent_request(self) -> dict[str, Any]:
        return {
            "method": self.method, "url": self.endpoint.url,
            "headers": {"host": self.endpoint.authority, **mask_secrets(self.headers, self.secrets)},
            "body": self.body,
        }  # fmt: skip

    @property
    def received_response(self) -> dict[str, Any] | None:
        if self.response is None or self.result is None:
            return None
        headers = {decode_text(name): decode_text(value) for name, value in self.response.headers}
        return {
            "status": self.response.status, "headers": mask_secrets(headers, self.secrets),
            "body": self.result["body"],
        }  # fmt: skip
