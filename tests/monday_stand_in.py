"""An emulator of monday.com: the GraphQL and OAuth requests that Timebell sends, and signed webhooks."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Monday:
    """One board. `says` replaces the next responses if set: a status, a body and headers."""

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.says: tuple[Any, ...] | None = None
        self.after: int | None = None
        """Number of responses before `says` applies."""
        self.asked: list[dict[str, Any]] = []
        self.tokens = {"secret"}
        """Accepted access tokens."""
        self.renews: Any = None
        """Computes the response of the token endpoint from the request: a status and a body."""
        self.renewals: list[dict[str, str]] = []
        self.url = ""
        self.daily_limit: int | None = None
        """Requests permitted a day; all others are refused."""
        self.webhooks: dict[str, dict[str, str]] = {}
        """Subscribed webhooks by id: `board`, `url` and `event`."""

    def put(
        self, id_: int, at: datetime | None, people: tuple[int, ...] = (), status: str = "open", state: str = "active"
    ) -> None:
        date = None if at is None else {"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}"}
        persons = {"personsAndTeams": [{"id": one, "kind": "person"} for one in people]}
        columns = {"due": date, "people": persons, "status": status}
        self.items[id_] = {
            "id": str(id_), "name": f"Item {id_}", "state": state, "board": {"id": "77"},
            "column_values": [{"id": name, "value": json.dumps(value)} for name, value in columns.items()],
        }  # fmt: skip

    def answer(self, asked: dict[str, Any]) -> tuple[Any, ...]:
        self.asked.append(asked)
        if self.after is not None:
            self.after -= 1
        if self.says is not None and (self.after is None or self.after < 0):
            return self.says
        if self.daily_limit is not None and len(self.asked) > self.daily_limit:
            extensions = {"code": "DAILY_LIMIT_EXCEEDED", "status_code": 429}
            return 200, {"errors": [{"message": "Daily limit exceeded", "extensions": extensions}]}
        if "create_webhook" in asked["query"]:
            id_ = str(1000 + len(self.asked))
            self.webhooks[id_] = asked["variables"]
            return 200, {"data": {"create_webhook": {"id": id_}}}
        if "delete_webhook" in asked["query"]:
            self.webhooks.pop(asked["variables"]["id"])
            return 200, {"data": {"delete_webhook": {"id": asked["variables"]["id"]}}}
        given, there = asked["variables"], dict(self.items)  # the test changes the items concurrently
        if "ids" in given:
            return 200, {"data": {"items": [there[int(id_)] for id_ in given["ids"] if int(id_) in there]}}
        start = int(given.get("cursor", "0"))
        ids = sorted(id_ for id_ in there if id_ > start)[: given["limit"]]
        more = any(id_ > ids[-1] for id_ in there) if ids else False
        page = {"cursor": str(ids[-1]) if more else None, "items": [there[id_] for id_ in ids]}
        if "cursor" in given:
            return 200, {"data": {"next_items_page": page}}
        return 200, {"data": {"boards": [{"items_page": page}]}}

    def renew(self, sent: dict[str, str]) -> tuple[Any, ...]:
        self.renewals.append(sent)
        return self.renews(sent) if callable(self.renews) else self.renews  # type: ignore[no-any-return]


@contextmanager
def board() -> Iterator[Monday]:
    """Serve a board at `url`; its token endpoint is `url`/token."""
    fake = Monday()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            from urllib.parse import parse_qsl

            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path.endswith("/token"):
                answer = fake.renew(dict(parse_qsl(body.decode())))
            elif self.headers["authorization"] not in fake.tokens:
                answer = 401, {}
            else:
                answer = fake.answer(json.loads(body))
            status, said, *more = answer
            sent = json.dumps(said).encode()
            self.send_response(status)
            for name, value in dict(*more).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *said: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_port}/v2"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield fake
        server.shutdown()


def signature(secret: str, path: str, *, algorithm: str = "HS256", lasts: float = 300.0, **claims: Any) -> str:
    """Return the JSON Web Token for the Authorization header of a webhook."""
    said = {"accountId": 1, "aud": f"https://bell.example{path}", "exp": int(time.time() + lasts), **claims}
    parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=") for one in ({"alg": algorithm}, said)]
    right = hmac.new(secret.encode(), b".".join(parts), sha256).digest()
    return b".".join([*parts, base64.urlsafe_b64encode(right).rstrip(b"=")]).decode()


def event(item: int, at: datetime | None, when: datetime | None = None, **more: Any) -> dict[str, Any]:
    """Return a monday.com event: the date of an item changed to this value."""
    value = None if at is None else {"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}", "icon": None}
    said: dict[str, Any] = {
        "app": "monday", "type": "update_column_value", "boardId": 77, "groupId": "topics", "pulseId": item,
        "pulseName": f"Item {item}", "columnId": "due", "columnType": "date", "value": value, "previousValue": None,
    }  # fmt: skip
    if when is not None:
        said["triggerTime"] = when.isoformat()
    return {"event": {**said, **more}}
