"""Alerts: what is told, when, and how it gets out through Apprise (Slack, PagerDuty, mail and a hundred others)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from timebell.errors import InvalidInput
from timebell.observe.watchdog import Problem

if TYPE_CHECKING:
    import apprise

log = logging.getLogger("timebell.alerts")

MOST, WINDOW = 10, 600.0
"""So many messages in so many seconds; what is still true afterwards is told then."""
AGAIN = 4 * 3600.0
"""Seconds after which a problem that lasts is told once more."""
PATIENCE = 20.0
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(?=[a-z][a-z0-9+.-]*://)")


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent; `resolved` says that a problem is over."""

    code: str
    text: str
    resolved: bool = False

    @property
    def title(self) -> str:
        """One line."""
        return f"Timebell: {self.code}{' resolved' if self.resolved else ''}"


class Desk:
    """Decides what is told of the problems there are: each once, once more while it lasts, and its end; never more
    than `MOST` messages in `WINDOW` seconds, so that what comes and goes is told as it stands in the end."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}
        self._sent: deque[float] = deque()

    @property
    def open(self) -> dict[str, str]:
        """What was told of and is not over: the text, by code."""
        return {code: text for code, (text, _) in self._told.items()}

    def take_over(self, told: Mapping[str, str], now: float) -> None:
        """Go on from what another desk left open (monotonic seconds of this one)."""
        self._told = {code: (text, self._told.get(code, ("", now))[1]) for code, text in told.items()}

    def news(self, problems: Iterable[Problem], now: float) -> list[Message]:
        """What to tell now (monotonic seconds)."""
        active = {one.code: one.text for one in problems}
        while self._sent and now - self._sent[0] >= WINDOW:
            self._sent.popleft()
        wanted = [Message(code, text) for code, text in active.items()
                  if code not in self._told or now - self._told[code][1] >= AGAIN]  # fmt: skip
        wanted += [
            Message(code, f"It is over: {text}", True) for code, (text, _) in self._told.items() if code not in active
        ]
        told = wanted[: MOST - len(self._sent)]
        for message in told:
            self._sent.append(now)
            if message.resolved:
                del self._told[message.code]
            else:
                self._told[message.code] = message.text, now
        return told


class Channels:
    """Where alerts go: Apprise URLs, each with a name or without (`billing=slack://...`)."""

    def __init__(self, urls: str | None = None) -> None:
        """`urls` are separated by spaces or commas. Raises InvalidInput (ALERTS_UNAVAILABLE, ALERT_URL_INVALID)."""
        self._by_name: dict[str, Any] = {}
        given = re.split(r"[\s,]+(?=(?:[\w.-]+=)?[a-z][a-z0-9+.-]*://)", (urls or "").strip(" ,\n"))
        for number, url in enumerate(filter(None, given), start=1):
            name = _NAMED.match(url)
            self._channel(name[1] if name else "", number, url[name.end() :] if name else url)

    def _channel(self, name: str, number: int, url: str) -> None:
        channel = self._by_name.get(name) or self._by_name.setdefault(name, _apprise())
        if not channel.add(url):
            raise InvalidInput(
                f"Alert URL number {number} is none that Apprise knows.", code="ALERT_URL_INVALID",
                fix="Their forms are on https://appriseit.com, such as mailto://user:password@example.com.",
            )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._by_name)

    async def send(self, message: Message, names: Collection[str] = ()) -> bool:
        """Tell those of these names, and those without a name if none is given or one is not known here; whether
        all were told."""
        unknown = [name for name in names if name not in self._by_name]
        if unknown:
            log.warning("no alert URL is called %s", ", ".join(unknown))
        chosen = [self._by_name[name] for name in names if name in self._by_name]
        if (unknown or not names) and "" in self._by_name:
            chosen.append(self._by_name[""])
        if not chosen:
            return not names
        kind = "success" if message.resolved else "failure"
        sending = [one.async_notify(body=message.text, title=message.title, notify_type=kind) for one in chosen]
        try:
            async with asyncio.timeout(PATIENCE):
                told = await asyncio.gather(*sending, return_exceptions=True)
        except TimeoutError:
            told = [None]
        if not all(one and not isinstance(one, BaseException) for one in told):
            log.error("an alert could not be sent: %s", message.title)
            return False
        return True


def _apprise() -> apprise.Apprise:
    try:
        import apprise
    except ImportError as missing:
        raise InvalidInput(
            "Alerts need Apprise.", code="ALERTS_UNAVAILABLE", fix='Install it: pip install "timebell[alerts]"'
        ) from missing
    return apprise.Apprise()
