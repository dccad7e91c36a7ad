"""Access tokens of a Google service account: exchanged by google-auth in a thread, ahead of their end."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from importlib.util import find_spec
from typing import Any

from timebell.errors import InvalidInput, Refused

SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
AHEAD = 300.0
"""Seconds before its end in which a token is replaced."""
EXCHANGE_SECONDS = 10.0
SOONEST = 60.0
"""Seconds after which one that lasts less than that is replaced unasked."""


def check_installed() -> None:
    """Raises Refused (EXTRA_MISSING)."""
    try:
        missing = [name for name in ("google.auth", "hpack") if find_spec(name) is None]
    except ModuleNotFoundError:
        missing = ["google.auth"]
    if missing:
        raise Refused(
            f"Push needs packages that are not installed ({', '.join(missing)}).", code="EXTRA_MISSING",
            fix='pip install "timebell[push]"',
        )  # fmt: skip


class TokenUnavailable(Exception):
    """No access token was to be had. `lasting`: Google refuses this account, so waiting does not help."""

    def __init__(self, why: str, *, lasting: bool) -> None:
        super().__init__(why)
        self.lasting = lasting


class ServiceAccount:
    """`credentials` is the JSON of a service account's key.

    Raises InvalidInput (FCM_CREDENTIALS_INVALID), Refused (EXTRA_MISSING).
    """

    def __init__(self, credentials: str, ca: str | None = None) -> None:
        check_installed()
        from google.oauth2 import service_account

        self._ca = ca
        try:
            info = json.loads(credentials)
            self.project: str = info["project_id"]
            self._google: Any = service_account.Credentials.from_service_account_info(info, scopes=[SCOPE])  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(
                "The credentials of FCM are not the JSON key of a service account.", code="FCM_CREDENTIALS_INVALID",
                fix="Firebase console, Project settings, Service accounts, Generate new private key; then set"
                " TIMEBELL_FCM_CREDENTIALS_FILE to that file.",
            ) from None  # fmt: skip
        self._until: float | None = None
        self._lasts = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def token(self) -> str:
        """One that is valid. Near its end a new one is fetched while the old one is still used.

        Raises TokenUnavailable.
        """
        now = asyncio.get_running_loop().time()
        if self._until is None or now >= self._until - AHEAD:
            refreshing = self._renew()
            if self._until is None or now >= self._until:
                await asyncio.shield(refreshing)
        return str(self._google.token)

    def _renew(self) -> asyncio.Task[None]:
        """Also when nobody sends: the first message of a day is not to wait for it."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)
        return self._refreshing

    def void(self, token: str) -> None:
        """It was not taken: the next asks for a new one."""
        if token == self._google.token:
            self._until = None

    async def close(self) -> None:
        """Wait for an exchange that is under way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing])

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()  # whoever waits has it; with nobody, the old one is good for a while

    async def _refresh(self) -> None:
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            await asyncio.to_thread(self._google.refresh, self._request)
        except TransportError as failed:
            raise TokenUnavailable(
                f"Google's token endpoint cannot be reached: {failed}"[:300], lasting=False
            ) from failed
        except (GoogleAuthError, ValueError) as failed:
            lasting = not getattr(failed, "retryable", False)
            raise TokenUnavailable(f"Google gives no access token: {failed}"[:300], lasting=lasting) from failed
        except Exception as failed:  # an answer that broke off or is odd: whoever has a message to send must hear of it
            raise TokenUnavailable(
                f"Google's token endpoint answers oddly: {type(failed).__name__}", lasting=False
            ) from failed
        loop = asyncio.get_running_loop()
        self._until = loop.time() + self._lasts
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(max(self._lasts - AHEAD, SOONEST), self._renew)

    def _request(
        self, url: str, method: str = "GET", body: Any = None, headers: Any = None, timeout: Any = None, **_: Any
    ) -> Any:
        """As google.auth.transport.Request wants it."""
        from google.auth.exceptions import TransportError

        if not url.startswith("https://"):
            raise TransportError("the token endpoint of the credentials is no https address")  # type: ignore[no-untyped-call]
        tls = ssl.create_default_context(cafile=self._ca)
        asked = urllib.request.Request(url, data=body, headers=headers or {}, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(asked, timeout=EXCHANGE_SECONDS, context=tls) as answer:  # noqa: S310
                data = answer.read()
            self._lasts = float(json.loads(data).get("expires_in", 0))  # google-auth keeps an instant of its own clock
            return _Answer(answer.status, dict(answer.headers), data)
        except urllib.error.HTTPError as answer:
            with answer:
                return _Answer(answer.code, dict(answer.headers), answer.read())
        except OSError as failed:
            raise TransportError(failed) from failed  # type: ignore[no-untyped-call]


class _Answer:
    def __init__(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.status, self.headers, self.data = status, headers, data
