"""Access tokens of a Google service account, fetched by google-auth in a thread and refreshed before they expire."""

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
REFRESH_AHEAD_SECONDS = 300.0
"""How long before its expiry a token is refreshed."""
EXCHANGE_SECONDS = 10.0
MIN_REFRESH_SECONDS = 60.0
"""The minimum time between background refreshes, for tokens with a short lifetime."""


def check_installed() -> None:
    """Raise Refused (EXTRA_MISSING) if a required package is not installed."""
    try:
        missing = [name for name in ("google.auth", "hpack") if find_spec(name) is None]
    except ModuleNotFoundError:
        missing = ["google.auth"]
    if missing:
        raise Refused(
            f"Push requires packages that are not installed ({', '.join(missing)}).", code="EXTRA_MISSING",
            fix='pip install "timebell[push]"',
        )  # fmt: skip


class TokenUnavailable(Exception):
    """No access token could be obtained. `permanent`: Google refuses this account, so waiting does not help."""

    def __init__(self, reason: str, *, permanent: bool) -> None:
        super().__init__(reason)
        self.permanent = permanent


class ServiceAccount:
    """A service account. `credentials` is its JSON key, `ca` a file of CA certificates instead of the system's.

    Raises InvalidInput (INVALID_FCM_CREDENTIALS), Refused (EXTRA_MISSING).
    """

    def __init__(self, credentials: str, ca: str | None = None) -> None:
        check_installed()
        from google.oauth2 import service_account

        self._ca = ca
        try:
            info = json.loads(credentials)
            self.project: str = info["project_id"]
            self._credentials: Any = service_account.Credentials.from_service_account_info(info, scopes=[SCOPE])  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(
                "The FCM credentials are not the JSON key of a service account.", code="INVALID_FCM_CREDENTIALS",
                fix="Firebase console, Project settings, Service accounts, Generate new private key; then set"
                " TIMEBELL_FCM_CREDENTIALS_FILE to that file.",
            ) from None  # fmt: skip
        self._expires_at: float | None = None
        self._lifetime = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def token(self) -> str:
        """Return a valid token. Shortly before its expiry it is refreshed in the background.

        Raises TokenUnavailable.
        """
        now = asyncio.get_running_loop().time()
        if self._expires_at is None or now >= self._expires_at - REFRESH_AHEAD_SECONDS:
            refresh = self._start_refresh()
            if self._expires_at is None or now >= self._expires_at:
                await asyncio.shield(refresh)
        return str(self._credentials.token)

    def _start_refresh(self) -> asyncio.Task[None]:
        """Start a refresh, unless one is running. A timer also does so, so that no message has to wait for it."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
            self._refreshing.add_done_callback(self._on_refreshed)
        return self._refreshing

    def invalidate(self, token: str) -> None:
        """Discard a rejected token, so that the next call fetches a new one."""
        if token == self._credentials.token:
            self._expires_at = None

    async def close(self) -> None:
        """Wait for a refresh in progress."""
        if self._timer is not None:
            self._timer.cancel()
        if self._refreshing is not None:
            await asyncio.wait([self._refreshing])

    def _on_refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved: callers get it, and in the background the old token is still valid

    async def _refresh(self) -> None:
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            await asyncio.to_thread(self._credentials.refresh, self._request)
        except TransportError as error:
            raise TokenUnavailable(f"Google's token endpoint is unreachable: {error}"[:300], permanent=False) from error
        except (GoogleAuthError, ValueError) as error:
            permanent = not getattr(error, "retryable", False)
            raise TokenUnavailable(f"Google refuses an access token: {error}"[:300], permanent=permanent) from error
        except Exception as error:  # an incomplete or invalid response must be reported to the caller
            raise TokenUnavailable(
                f"Google's token endpoint sent an invalid response: {type(error).__name__}", permanent=False
            ) from error
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + self._lifetime
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(
            max(self._lifetime - REFRESH_AHEAD_SECONDS, MIN_REFRESH_SECONDS), self._start_refresh
        )

    def _request(
        self, url: str, method: str = "GET", body: Any = None, headers: Any = None, timeout: Any = None, **_: Any
    ) -> Any:
        """Send a request: the callable that google-auth expects (`google.auth.transport.Request`)."""
        from google.auth.exceptions import TransportError

        if not url.startswith("https://"):
            raise TransportError("the token endpoint of the credentials is not an https URL")  # type: ignore[no-untyped-call]
        tls = ssl.create_default_context(cafile=self._ca)
        request = urllib.request.Request(url, data=body, headers=headers or {}, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=EXCHANGE_SECONDS, context=tls) as response:  # noqa: S310
                data = response.read()
            # Taken here, because google-auth only provides an expiry time by the wall clock.
            self._lifetime = float(json.loads(data).get("expires_in", 0))
            return _TransportResponse(response.status, dict(response.headers), data)
        except urllib.error.HTTPError as response:
            with response:
                return _TransportResponse(response.code, dict(response.headers), response.read())
        except OSError as error:
            raise TransportError(error) from error  # type: ignore[no-untyped-call]


class _TransportResponse:
    def __init__(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.status, self.headers, self.data = status, headers, data
