"""A monday.com to try things on: one board behind GraphQL, tokens that end, and webhooks that are signed.

    python monday.py [--port 0] [--lasts 3600]

It prints its address. What a person would do in the browser is done by PUT /items/ID {"date", "time"} ({} clears it),
DELETE /items/ID, DELETE /board and PUT /board; what the app did to it is at GET /notifications.
"""

from __future__ import annotations

import argparse
import base64
import hmac
import json
import threading
import time
import urllib.request
from datetime import UTC, datetime
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

BOARD, APP_TOKEN, SIGNING_SECRET = "1234567890", "app-token", "the signing secret of the app"
GONE = {"errors": [{"message": "Board not found", "extensions": {"code": "ResourceNotFoundException"}}]}


class Account:
    """The board, its webhooks, and the tokens that are good."""

    def __init__(self, lasts: float) -> None:
        self.lasts = lasts
        self.there = True
        self.dates: dict[int, dict[str, Any] | None] = {1: None}
        self.hooks: list[str] = []
        self.notifications: list[dict[str, Any]] = []
        self.refused = 0
        self.tokens = {APP_TOKEN: float("inf")}
        self.refresh = "refresh-0"
        self.lock = threading.Lock()

    def renew(self, form: dict[str, str]) -> tuple[int, Any]:
        """POST /oauth2/token: each refresh token is good once."""
        with self.lock:
            if form.get("refresh_token") != self.refresh:
                return 400, {"error": "invalid_grant"}
            number = int(self.refresh.rpartition("-")[2]) + 1
            self.refresh = f"refresh-{number}"
            self.tokens[f"access-{number}"] = time.time() + self.lasts
            return 200, {
                "access_token": f"access-{number}", "refresh_token": self.refresh, "expires_in": self.lasts,
            }  # fmt: skip

    def ask(self, token: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """POST /v2: as much GraphQL as an app of this kind needs."""
        query, given = asked["query"], asked.get("variables", {})
        with self.lock:
            if token == "access-0":  # the first one lasts from when it is first used
                self.tokens.setdefault(token, time.time() + self.lasts)
            if self.tokens.get(token, 0) < time.time():
                self.refused += 1
                return 401, {"errors": [{"message": "Not Authenticated"}]}
            if "create_notification" in query:
                self.notifications.append(given)
                return 200, {"data": {"create_notification": {"text": given["text"]}}}
            if not self.there:
                return 200, GONE  # as monday.com does: an HTTP 200
            if "create_webhook" not in query:
                return 200, {"data": self._read(query, given)}
        challenge = base64.b64encode(repr(time.time()).encode()).decode()
        if self._post(given["url"], {"challenge": challenge}) != {"challenge": challenge}:
            return 200, {"errors": [{"message": "The challenge failed", "extensions": {"status_code": 400}}]}
        self.hooks.append(given["url"])
        return 200, {"data": {"create_webhook": {"id": str(len(self.hooks))}}}

    def _read(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "next_items_page" in query or "items_page" in query:
            after = int(given.get("cursor", 0))
            ids = [one for one in sorted(self.dates) if one > after]
            page, more = ids[: given["limit"]], len(ids) > given["limit"]
            found = {"cursor": str(page[-1]) if more else None, "items": [self._item(one) for one in page]}
            return {"next_items_page": found} if "cursor" in given else {"boards": [{"items_page": found}]}
        return {"items": [self._item(int(one)) for one in given["ids"] if int(one) in self.dates]}

    def _item(self, id_: int) -> dict[str, Any]:
        value = None if self.dates[id_] is None else json.dumps(self.dates[id_])
        return {
            "id": str(id_), "name": f"Item {id_}", "state": "active", "board": {"id": BOARD},
            "column_values": [{"id": "date4", "text": "", "value": value}],
        }  # fmt: skip

    def put(self, id_: int, date: dict[str, Any] | None) -> None:
        """Somebody sets a date: webhooks say so."""
        with self.lock:
            self.dates[id_] = date
        self._tell("update_column_value", id_, {"columnId": "date4", "columnType": "date", "value": date})

    def delete(self, id_: int) -> None:
        """Somebody deletes an item: webhooks say so."""
        with self.lock:
            self.dates.pop(id_, None)
        self._tell("delete_pulse", id_, {})

    def _tell(self, kind: str, id_: int, more: dict[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = {"app": "monday", "type": kind, "boardId": int(BOARD), "pulseId": id_, "triggerTime": at, **more}
        for url in self.hooks:
            self._post(url, {"event": event})

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        head = {"Content-Type": "application/json", "Authorization": signature(url)}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, json.dumps(body).encode(), head), timeout=10
            ) as said:
                return json.load(said)
        except OSError:
            return None  # it would be sent again, once a minute for half an hour


def signature(url: str) -> str:
    """The JSON Web Token that a webhook of an app has."""
    claims = {"accountId": 1, "userId": 1, "aud": url, "iat": int(time.time()), "exp": int(time.time()) + 300}
    parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=") for one in ({"alg": "HS256"}, claims)]
    right = hmac.new(SIGNING_SECRET.encode(), b".".join(parts), sha256).digest()
    return b".".join([*parts, base64.urlsafe_b64encode(right).rstrip(b"=")]).decode()


def handler(account: Account) -> type[BaseHTTPRequestHandler]:
    """What answers for an account."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            match (self.command, *self.path.strip("/").split("/")):
                case ("POST", "v2"):
                    answer = account.ask(self.headers.get("authorization", ""), json.loads(body))
                case ("POST", "oauth2", "token"):
                    answer = account.renew(dict(parse_qsl(body.decode())))
                case ("PUT", "items", id_):
                    answer = 200, account.put(int(id_), json.loads(body) or None)
                case ("DELETE", "items", id_):
                    answer = 200, account.delete(int(id_))
                case ("PUT" | "DELETE" as verb, "board"):
                    account.there = verb == "PUT"
                    answer = 200, None
                case ("GET", "notifications"):
                    answer = 200, {"sent": account.notifications, "hooks": account.hooks, "refused": account.refused}
                case _:
                    answer = 404, None
            sent = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def __getattr__(self, name: str) -> Any:
            """All verbs are answered there."""
            if name.startswith("do_"):
                return self.do_POST
            raise AttributeError(name)

        def log_message(self, *said: Any) -> None:
            """Quiet."""

    return Handler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A monday.com to try things on.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lasts", type=float, default=3600.0, help="seconds that a token lasts")
    given = parser.parse_args()
    with ThreadingHTTPServer(("127.0.0.1", given.port), handler(Account(given.lasts))) as server:
        server.daemon_threads = True
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
