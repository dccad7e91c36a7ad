"""A fake of Firebase Cloud Messaging (FCM) for tests. It implements the protocol and runs as a separate process.

    with FakeFcm() as fcm:
        fcm.rules({"do": "UNREGISTERED", "match": "^dead"})
        ...                          # send to fcm.url with fcm.credentials and the CA certificate fcm.ca
        assert fcm.received() == {"token-1": ["0:17..."]}

It exchanges signed assertions for access tokens, serves `messages:send` over HTTP/2 and HTTP/1.1, validates messages by
the documentation of FCM, enforces a quota, simulates failures by rules, and records the messages that each device
received. Google's firebase-admin works with it.
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
    """Context manager that starts the fake FCM and controls it.

    `streams` is the limit of concurrent HTTP/2 streams per connection.
    """

    def __init__(self, *, streams: int = 100) -> None:
        self._streams = streams

    def __enter__(self) -> FakeFcm:
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "timebell_fcm_emulator.server", self._folder.name]
        self._process = subprocess.Popen(  # noqa: S603
            [*command, "--streams", str(self._streams)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        try:
            output = self._process.stdout.readline()
            self.port: int = json.loads(output)["port"]
        except ValueError:
            self._stop()
            raise RuntimeError("The fake FCM did not start; see its output above.") from None
        self.url = f"https://localhost:{self.port}"
        self.ca = str(Path(self._folder.name) / "ca.pem")
        self.credentials = (Path(self._folder.name) / "credentials.json").read_text()
        """A service account as JSON, for TIMEBELL_FCM_CREDENTIALS."""
        self._tls_context = ssl.create_default_context(cafile=self.ca)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def _stop(self) -> None:
        with self._process as process:  # closing stdin ends the process; leaving the block waits for it
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()

    def rules(self, *rules: dict[str, Any]) -> None:
        """Replace the rules for messages; see `timebell_fcm_emulator.rules.Rule` for their fields.

        The first rule whose `match` (a regular expression) matches the target applies; without one, the message is
        accepted.
        """
        self._request("POST", "rules", list(rules))

    def quota(self, per_minute: int | None) -> None:
        """Limit the messages per minute, from now on; None for no limit."""
        self._request("POST", "quota", per_minute)

    def expire_tokens(self, seconds: float = 3600.0) -> None:
        """Invalidate all access tokens, and set the lifetime of new ones."""
        self._request("POST", "tokens", seconds)

    def refuse_account(self, refused: bool = True) -> None:
        """Refuse access tokens to the service account, as Google does after its key was deleted; or no longer."""
        self._request("POST", "account", refused)

    def goaway(self) -> None:
        """Send GOAWAY on every HTTP/2 connection; requests received before are still answered."""
        self._request("POST", "goaway")

    def reset(self) -> None:
        """Remove all rules, the quota, the refusal of the account and the recorded messages."""
        self._request("POST", "reset")

    def received(self) -> dict[str, list[str]]:
        """Return the ids of the messages that each token, topic or condition received, oldest first."""
        received: dict[str, list[str]] = self._request("GET", "received")
        return received

    def bodies(self) -> dict[str, list[dict[str, Any]]]:
        """Return the request bodies of the first 100,000 accepted messages, by token, topic or condition."""
        bodies: dict[str, list[dict[str, Any]]] = self._request("GET", "bodies")
        return bodies

    def counts(self) -> dict[str, Any]:
        """Return counters and the current rules.

        `answered` contains the number of responses by code, `twice` the number of targets that received more than one
        message, and `exchanges` the number of token requests. `first` and `last` are the times of the first and the
        last accepted message, in seconds of the machine's monotonic clock.
        """
        counts: dict[str, Any] = self._request("GET", "counts")
        return counts

    def _request(self, method: str, name: str, body: Any = None) -> Any:
        connection = http.client.HTTPSConnection("localhost", self.port, context=self._tls_context, timeout=30)
        try:
            connection.request(method, f"/fake/{name}", None if method == "GET" else json.dumps(body))
            response = connection.getresponse()
            result = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(result["error"])
        return result
