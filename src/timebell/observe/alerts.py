"""Alerts: deduplication, rate limiting, and delivery through Apprise (Slack, PagerDuty, email and others)."""

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

MAX_MESSAGES, WINDOW_SECONDS = 10, 600.0
"""At most MAX_MESSAGES messages in WINDOW_SECONDS seconds. Excess messages are sent later if they still apply."""
MAX_SEPARATE_MESSAGES = 3
"""More messages at once are combined into one, of at most MAX_DIGEST_LINES lines."""
MAX_DIGEST_LINES = 30
UPDATE_INTERVAL_SECONDS = 900.0
"""Seconds after which a problem with more events is sent again."""
REMINDER_INTERVAL_SECONDS = 4 * 3600.0
"""Seconds after which a reminder of an ongoing problem is sent."""
SEND_TIMEOUT_SECONDS = 20.0
_NAMED_URL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(?=[a-z][a-z0-9+.-]*://)")


@dataclass(frozen=True, slots=True)
class Message:
    """Alert message; `resolved` marks the end of a problem."""

    code: str
    text: str
    resolved: bool = False

    @property
    def title(self) -> str:
        """One-line title."""
        return f"Timebell: {self.code}{' resolved' if self.resolved else ''}"


class AlertTracker:
    """Decide which messages to send about current problems.

    Each problem is sent once, again every REMINDER_INTERVAL_SECONDS while it lasts, after UPDATE_INTERVAL_SECONDS if
    there were more events, and once when it is resolved. The rate limit delays messages, so a flapping problem is
    eventually reported in its current state. Many messages at once become one.
    """

    def __init__(self) -> None:
        self._alerted: dict[str, tuple[str, float]] = {}
        self._events: dict[str, int] = {}
        self._sent_at: deque[float] = deque()

    @property
    def open_alerts(self) -> dict[str, str]:
        """Texts of the reported problems that are not resolved, by code."""
        return {code: text for code, (text, _) in self._alerted.items()}

    def restore(self, alerts: Mapping[str, str], now: float) -> None:
        """Take over the open alerts of another tracker. `now` is this process's monotonic time in seconds."""
        self._alerted = {code: (text, self._alerted.get(code, ("", now))[1]) for code, text in alerts.items()}

    def due_messages(self, problems: Iterable[Problem], now: float) -> list[Message]:
        """Return the messages to send now and mark them as sent. `now` is monotonic time in seconds."""
        active = {problem.code: problem for problem in problems}
        while self._sent_at and now - self._sent_at[0] >= WINDOW_SECONDS:
            self._sent_at.popleft()
        wanted = [Message(code, problem.text) for code, problem in active.items() if self._is_due(problem, now)]
        wanted += [
            Message(code, f"Resolved: {text}", True) for code, (text, _) in self._alerted.items() if code not in active
        ]
        available = MAX_MESSAGES - len(self._sent_at)
        due = wanted if available > 0 and len(wanted) > MAX_SEPARATE_MESSAGES else wanted[: max(available, 0)]
        for message in due:
            if message.resolved:
                del self._alerted[message.code]
                self._events.pop(message.code, None)
            else:
                self._alerted[message.code] = message.text, now
                self._events[message.code] = active[message.code].events
        messages = due if len(due) <= MAX_SEPARATE_MESSAGES else [_digest(due)]
        self._sent_at.extend(now for _ in messages)
        return messages

    def _is_due(self, problem: Problem, now: float) -> bool:
        if problem.code not in self._alerted:
            return True
        has_more_events = problem.events > self._events.get(problem.code, problem.events)
        interval = UPDATE_INTERVAL_SECONDS if has_more_events else REMINDER_INTERVAL_SECONDS
        return now - self._alerted[problem.code][1] >= interval


def _digest(messages: list[Message]) -> Message:
    """Combine messages into one; it is resolved if all of them are."""
    lines = [f"{message.code}: {message.text}" for message in messages[:MAX_DIGEST_LINES]]
    if len(messages) > MAX_DIGEST_LINES:
        lines.append(f"and {len(messages) - MAX_DIGEST_LINES} more")
    resolved = all(message.resolved for message in messages)
    return Message(f"{len(messages)} PROBLEMS", "\n".join(lines), resolved)


class Channels:
    """Alert destinations: Apprise URLs, optionally named (`billing=slack://...`)."""

    def __init__(self, urls: str | None = None) -> None:
        """Parse URLs separated by spaces or commas. Raises InvalidInput (ALERTS_UNAVAILABLE, INVALID_ALERT_URL)."""
        self._by_name: dict[str, Any] = {}
        entries = re.split(r"[\s,]+(?=(?:[\w.-]+=)?[a-z][a-z0-9+.-]*://)", (urls or "").strip(" ,\n"))
        for number, url in enumerate(filter(None, entries), start=1):
            name = _NAMED_URL.match(url)
            self._add_url(name[1] if name else "", number, url[name.end() :] if name else url)

    def _add_url(self, name: str, number: int, url: str) -> None:
        channel = self._by_name.get(name) or self._by_name.setdefault(name, _apprise())
        if not channel.add(url):
            raise InvalidInput(
                f"Apprise does not support alert URL number {number}.", code="INVALID_ALERT_URL",
                fix="Use a URL format listed on https://appriseit.com, such as mailto://user:password@example.com.",
            )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._by_name)

    async def send(self, message: Message, names: Collection[str] = ()) -> bool:
        """Send a message to the channels with these names; return whether all deliveries succeeded.

        Unnamed channels receive it if `names` is empty or contains an unknown name.
        """
        unknown = [name for name in names if name not in self._by_name]
        if unknown:
            log.warning("no alert URL is named %s", ", ".join(unknown))
        chosen = [self._by_name[name] for name in names if name in self._by_name]
        if (unknown or not names) and "" in self._by_name:
            chosen.append(self._by_name[""])
        if not chosen:
            return not names
        kind = "success" if message.resolved else "failure"
        sending = [channel.async_notify(body=message.text, title=message.title, notify_type=kind) for channel in chosen]
        try:
            async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                results = await asyncio.gather(*sending, return_exceptions=True)
        except TimeoutError:
            results = [None]
        if not all(result and not isinstance(result, BaseException) for result in results):
            log.error("could not send alert: %s", message.title)
            return False
        return True


def _apprise() -> apprise.Apprise:
    try:
        import apprise
    except ImportError as missing:
        raise InvalidInput(
            "Alerts require Apprise.", code="ALERTS_UNAVAILABLE", fix='Install it: pip install "timebell[alerts]"'
        ) from missing
    return apprise.Apprise()
