"""A simulated monday.com for testing: one board with a GraphQL API, expiring tokens and signed webhooks.

    python monday.py [--port 0] [--lasts 3600]

It prints its address. Changes that a user would make in the browser are PUT /items/ID {"date", "time"} ({} clears the
date), DELETE /items/ID, DELETE /board and PUT /board. GET /notifications returns the actions of the app.
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
    """An account with one board, its webhooks and the valid tokens; `token_lifetime` is in seconds."""

    def __init__(self, token_lifetime: float) -> None:
        self.token_lifetime = token_lifetime
        self.board_exists = True
        self.dates: dict[int, dict[str, Any] | None] = {1: None}
        self.hooks: dict[str, tuple[str, str]] = {}  # URL and event by id
        self.notifications: list[dict[str, Any]] = []
        self.refused = 0
        self.webhooks_created = 0
        self.tokens = {APP_TOKEN: float("inf")}
        self.refresh = "refresh-0"
        self.lock = threading.Lock()

    def renew(self, form: dict[str, str]) -> tuple[int, Any]:
        """POST /oauth2/token: each refresh token is valid once."""
        with self.lock:
            if form.get("refresh_token") != self.refresh:
                return 400, {"error": "invalid_grant"}
            number = int(self.refresh.rpartition("-")[2]) + 1
            self.refresh = f"refresh-{number}"
            self.tokens[f"access-{number}"] = time.time() + self.token_lifetime
            return 200, {
                "access_token": f"access-{number}", "refresh_token": self.refresh, "expires_in": self.token_lifetime,
            }  # fmt: skip

    def execute(self, token: str, request: dict[str, Any]) -> tuple[int, Any]:
        """POST /v2: the part of the GraphQL API that the app uses."""
        query, variables = request["query"], request.get("variables", {})
        with self.lock:
            if token == "access-0":  # the lifetime of the first token starts at its first use
                self.tokens.setdefault(token, time.time() + self.token_lifetime)
            if self.tokens.get(token, 0) < time.time():
                self.refused += 1
                return 401, {"errors": [{"message": "Not Authenticated"}]}
            if "create_notification" in query:
                self.notifications.append(variables)
                return 200, {"data": {"create_notification": {"text": variables["text"]}}}
            if not self.board_exists:
                return 200, GONE  # monday.com responds with HTTP 200, too
            if "delete_webhook" in query:
                self.hooks.pop(variables["id"], None)
                return 200, {"data": {"delete_webhook": {"id": variables["id"]}}}
            if "create_webhook" not in query:
                return 200, {"data": self._read(query, variables)}
        challenge = base64.b64encode(repr(time.time()).encode()).decode()
        if self._post(variables["url"], {"challenge": challenge}) != {"challenge": challenge}:
            return 200, {"errors": [{"message": "The challenge failed", "extensions": {"status_code": 400}}]}
        with self.lock:
            self.webhooks_created += 1
            id_ = str(self.webhooks_created)
            self.hooks[id_] = variables["url"], variables["event"]
        return 200, {"data": {"create_webhook": {"id": id_}}}

    def _read(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "next_items_page" in query or "items_page" in query:
            after = int(variables.get("cursor", 0))
            ids = [id_ for id_ in sorted(self.dates) if id_ > after]
            page, has_more = ids[: variables["limit"]], len(ids) > variables["limit"]
            result = {"cursor": str(page[-1]) if has_more else None, "items": [self._item(id_) for id_ in page]}
            return {"next_items_page": result} if "cursor" in variables else {"boards": [{"items_page": result}]}
        return {"items": [self._item(int(id_)) for id_ in variables["ids"] if int(id_) in self.dates]}

    def _item(self, id_: int) -> dict[str, Any]:
        value = None if self.dates[id_] is None else json.dumps(self.dates[id_])
        return {
            "id": str(id_), "name": f"Item {id_}", "state": "active", "board": {"id": BOARD},
            "column_values": [{"id": "date4", "text": "", "value": value}],
        }  # fmt: skip

    def put(self, id_: int, date: dict[str, Any] | None) -> None:
        """Set the date of an item and send webhooks."""
        with self.lock:
            event = "change_column_value" if id_ in self.dates else "create_item"
            self.dates[id_] = date
        if event == "create_item":
            self._send_webhooks(event, "create_pulse", id_, {})
        self._send_webhooks(
            "change_column_value",
            "update_column_value",
            id_,
            {"columnId": "date4", "columnType": "date", "value": date},
        )

    def delete(self, id_: int) -> None:
        """Delete an item and send webhooks."""
        with self.lock:
            self.dates.pop(id_, None)
        self._send_webhooks("item_deleted", "delete_pulse", id_, {})

    def _send_webhooks(self, subscribed: str, kind: str, id_: int, more: dict[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event = {"app": "monday", "type": kind, "boardId": int(BOARD), "pulseId": id_, "triggerTime": at, **more}
        for url, hook_event in list(self.hooks.values()):
            if hook_event == subscribed:
                self._post(url, {"event": event})

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": signature(url)}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return json.load(response)
        except OSError:
            return None  # the real monday.com retries once a minute for half an hour


def signature(url: str) -> str:
    """Return the JSON Web Token that authenticates a webhook of an app."""
    claims = {"accountId": 1, "userId": 1, "aud": url, "iat": int(time.time()), "exp": int(time.time()) + 300}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "HS256"}, claims)]
    digest = hmac.new(SIGNING_SECRET.encode(), b".".join(parts), sha256).digest()
    return b".".join([*parts, base64.urlsafe_b64encode(digest).rstrip(b"=")]).decode()


def handler(account: Account) -> type[BaseHTTPRequestHandler]:
    """Return the HTTP request handler of an account."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            match (self.command, *self.path.strip("/").split("/")):
                case ("POST", "v2"):
                    result = account.execute(self.headers.get("authorization", ""), json.loads(body))
                case ("POST", "oauth2", "token"):
                    result = account.renew(dict(parse_qsl(body.decode())))
                case ("PUT", "items", id_):
                    result = 200, account.put(int(id_), json.loads(body) or None)
                case ("DELETE", "items", id_):
                    result = 200, account.delete(int(id_))
                case ("PUT" | "DELETE" as method, "board"):
                    account.board_exists = method == "PUT"
                    result = 200, None
                case ("GET", "notifications"):
                    result = (
                        200,
                        {
                            "sent": account.notifications,
                            "hooks": list(account.hooks.values()),
                            "refused": account.refused,
                        },
                    )
                case _:
                    result = 404, None
            content = json.dumps(result[1]).encode()
            self.send_response(result[0])
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def __getattr__(self, name: str) -> Any:
            """Handle every HTTP method with do_POST."""
            if name.startswith("do_"):
                return self.do_POST
            raise AttributeError(name)

        def log_message(self, *args: Any) -> None:
            """Do not log requests."""

    return Handler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A simulated monday.com for testing.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lasts", type=float, default=3600.0, help="lifetime of a token in seconds")
    args = parser.parse_args()
    with ThreadingHTTPServer(("127.0.0.1", args.port), handler(Account(args.lasts))) as server:
        server.daemon_threads = True
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
