"""A stand-in for Firebase Cloud Messaging that speaks its protocol: a process of its own, for tests.

    with FakeFcm() as fcm:
        fcm.rules({"do": "UNREGISTERED", "match": "^dead"})
        ...                          # send with fcm.credentials to fcm.url, trusting fcm.ca
        assert fcm.received() == {"token-1": ["0:17..."]}

It exchanges signed assertions for access tokens, answers `messages:send` over HTTP/2 and HTTP/1.1, checks messages as
FCM documents it, keeps a quota, fails as it is told, and keeps a ledger of what each device received. Google's own
firebase-admin takes it for the real one. It needs the extra `timebell[push]`.
"""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["FakeFcm"]


class FakeFcm:
    """Starts the process, and speaks with it through its own doors."""

    def __init__(self, *, streams: int = 100) -> None:
        self._streams = streams

    def __enter__(self) -> FakeFcm:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "timebell.testing.fcm.server", self._folder.name]
        self._process = subprocess.Popen(  # noqa: S603
            [*command, "--streams", str(self._streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        try:
            said = self._process.stdout.readline()
            self.port: int = json.loads(said)["port"]
        except ValueError:
            self._end()
            raise RuntimeError("The fake FCM did not start; what it said is above.") from None
        self.url = f"https://localhost:{self.port}"
        self.ca = str(Path(self._folder.name) / "ca.pem")
        self.credentials = (Path(self._folder.name) / "credentials.json").read_text()
        """A service account, as JSON: what TIMEBELL_FCM_CREDENTIALS takes."""
        self._own = ssl.create_default_context(cafile=self.ca)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def _end(self) -> None:
        with self._process as process:  # closes its stdin, which ends it, and waits
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()

    def rules(self, *rules: dict[str, Any]) -> None:
        """What to do to messages, in place of the rules before: see timebell.testing.fcm.rules.Rule.

        The first that matches the target (a regular expression) decides; where none does, the message is accepted.
        """
        self._ask("POST", "rules", list(rules))

    def quota(self, per_minute: int | None) -> None:
        """So many messages a minute, from now on; None for no limit."""
        self._ask("POST", "quota", per_minute)

    def expire_tokens(self, seconds: float = 3600.0) -> None:
        """Every access token is void; new ones last so long."""
        self._ask("POST", "tokens", seconds)

    def goaway(self) -> None:
        """Tell every HTTP/2 connection to go elsewhere, when what it sent is answered."""
        self._ask("POST", "goaway")

    def reset(self) -> None:
        """Forget rules, quota and ledger."""
        self._ask("POST", "reset")

    def received(self) -> dict[str, list[str]]:
        """The ids of the messages that each token, topic or condition received, oldest first."""
        found: dict[str, list[str]] = self._ask("GET", "received")
        return found

    def bodies(self) -> dict[str, list[dict[str, Any]]]:
        """The first 100,000 messages as they were sent, by token, topic or condition."""
        found: dict[str, list[dict[str, Any]]] = self._ask("GET", "bodies")
        return found

    def counts(self) -> dict[str, Any]:
        """requests, accepted, answered (by code), targets, twice, exchanges, connections; first and last: when a
        message was accepted, in seconds of the machine's monotonic clock."""
        found: dict[str, Any] = self._ask("GET", "counts")
        return found

    def _ask(self, method: str, what: str, body: Any = None) -> Any:
        connection = http.client.HTTPSConnection("localhost", self.port, context=self._own, timeout=30)
        try:
            connection.request(method, f"/fake/{what}", None if method == "GET" else json.dumps(body))
            answer = connection.getresponse()
            found = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(found["error"])
        return found
