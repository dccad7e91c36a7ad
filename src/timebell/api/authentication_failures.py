"""Record of failed authentications: counted by reason, logged, and throttled for passwords."""

from __future__ import annotations

import logging
from collections import deque

from timebell.api.client_address import client_network
from timebell.app import Timebell
from timebell.errors import TimebellError

log = logging.getLogger("timebell.api")

MAX_SIGN_INS_PER_MINUTE = 10  # failed ones, per client network
LOG_INTERVAL_SECONDS = 60.0  # between two lines about the same network and reason
MAX_ENTRIES = 10_000


class TooManySignIns(TimebellError):
    """Too many failed sign-ins from this address."""

    code = "TOO_MANY_SIGN_INS"


class AuthenticationFailures:
    """Failed authentications of this process. Failures of one client never affect valid keys or other clients."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._sign_ins: dict[str, deque[float]] = {}
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def record(self, reason: str, address: str) -> None:
        """Count and log a failure. `reason` is a label of `timebell_auth_failures_total`."""
        if self._app.service is not None:
            self._app.service.node.counters.authentication_failures.add(reason)
        if reason == "missing_key":  # also sent by honest probes
            return
        at, entry = self._app.clock.monotonic(), (reason, client_network(address))
        logged_at, unlogged = self._logged.get(entry, (None, 0))
        if logged_at is not None and at - logged_at < LOG_INTERVAL_SECONDS:
            self._logged[entry] = (logged_at, unlogged + 1)
            return
        if len(self._logged) > MAX_ENTRIES:
            self._logged.clear()
        self._logged[entry] = (at, 0)
        log.warning("authentication failed reason=%s address=%s not_logged_since=%d", reason, address, unlogged)

    def begin_sign_in(self, address: str) -> float:
        """Count a password attempt before its password is verified, so that concurrent attempts count too.

        Return the value to pass to `discard_attempt` if the password is correct. Raises TooManySignIns.
        """
        recent, at = self._recent_sign_ins(address), self._app.clock.monotonic()
        if len(recent) >= MAX_SIGN_INS_PER_MINUTE:
            self.record("throttled", address)
            raise TooManySignIns("Too many sign-ins from this address failed.", fix="Wait a minute.")
        recent.append(at)
        return at

    def discard_attempt(self, address: str, at: float) -> None:
        """Remove a sign-in attempt that was not a wrong password from the count."""
        recent = self._recent_sign_ins(address)
        if at in recent:
            recent.remove(at)

    def _recent_sign_ins(self, address: str) -> deque[float]:
        """Return the times of password attempts from the client network within the last minute."""
        if len(self._sign_ins) > MAX_ENTRIES:
            self._sign_ins.clear()
        times = self._sign_ins.setdefault(client_network(address), deque(maxlen=MAX_SIGN_INS_PER_MINUTE))
        while times and self._app.clock.monotonic() - times[0] > 60:
            times.popleft()
        return times
