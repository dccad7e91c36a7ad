"""What the targets that publish to a queue share: options, message, confirmation, and what failures come to."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from timebell import tracing
from timebell.errors import InvalidInput, InvalidPayload, Refused
from timebell.targets import bodies
from timebell.targets.base import Delivery, Outcome, instant, message_id, only
from timebell.tenancy.tokens import token_of

CONFIRM_SECONDS = 10.0
ACKS = ("published", "reported")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,29}")
_NAMED = re.compile(rf"\s({_NAME.pattern})=(?=[a-z][a-z0-9+.-]*://)")


@dataclass(frozen=True, slots=True)
class Message:
    """What goes into the queue: an id to drop doubles by, a body, and the delivery it was made of."""

    id: str
    body: Any
    data: bytes
    """The body as JSON."""
    delivery: Delivery
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The body as JSON."""
        return self.data


class BrokerError(Exception):
    """A publish that failed, with its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.error)


class Broker(ABC):
    """A queue to publish to: at the URL of the operator, or at that which the option `connection` names, as targets
    under a name may, and jobs may not.

    A kind says its `options` beside these, `ack` and the body, checks them in `read`, publishes in `publish` and
    says in `failure` what an error of its library means. One instance serves many deliveries at once, on one
    connection a URL, kept until `close`.
    """

    kind: str
    options: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        self._urls = urls(url)
        self._server = server.rstrip("/")
        self._secret_key = secret_key

    @abstractmethod
    def read(self, options: dict[str, Any]) -> dict[str, Any]:
        """The kind's own options in normal form. Raises InvalidInput (TARGET_OPTIONS_INVALID)."""

    @abstractmethod
    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any] | Outcome:
        """Publish, and come back when the queue has confirmed it, with what is kept as the result (JSON); or with an
        outcome, where there was nothing to publish."""

    @abstractmethod
    def failure(self, error: Exception) -> Outcome | None:
        """What an error of the library means: `unreachable()`, `refused()`, ...; None for a fault of ours."""

    @abstractmethod
    async def close(self) -> None:
        """Give back connections."""

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Raises InvalidInput (TARGET_OPTIONS_INVALID) or Refused (BROKER_NOT_CONFIGURED, SECRET_KEY_MISSING)."""
        only(options, {"ack", "connection", *bodies.OPTIONS} | self.options)
        self._connection(options)
        named = {"connection": options["connection"]} if "connection" in options else {}
        ack, body = options.get("ack", "published"), bodies.checked(options, "plain")
        if ack not in ACKS:
            raise invalid(f"ack cannot be {ack!r:.60}.", "Use published or reported.")
        if ack == "reported":
            token_of(self._secret_key, "", 0)  # raises where none can be made
        return {"ack": ack, **named, **body, **self.read(options)}

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Codes of failure: see the package. An interrupted publish may have been one: the id tells."""
        try:
            url, message = self._connection(options), self.message(delivery, options)
        except (InvalidPayload, Refused) as refused:  # no body; or no connection, or no token, here
            return Outcome.failed(refused.code, str(refused), retryable=False)
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                result = await self.publish(url, message, options)
        except BrokerError as known:
            return known.outcome
        except TimeoutError:
            return unreachable(f"no confirmation within {CONFIRM_SECONDS:g} s")
        except Exception as error:
            outcome = self.failure(error)
            if outcome is None:
                raise
            return outcome
        if isinstance(result, Outcome):
            return result
        outcome = Outcome.ok({"messageId": message.id} | result)
        outcome.reports = options.get("ack") == "reported"
        return outcome

    def message(self, delivery: Delivery, options: dict[str, Any]) -> Message:
        """The message of a delivery. Raises Refused (SECRET_KEY_MISSING), InvalidPayload (BODY_UNFIT, ...)."""
        report = None
        headers = {
            "timebell-job-id": delivery.job_id,
            "timebell-topic": delivery.topic,
            "timebell-occurrence-key": delivery.occurrence_key,
            "timebell-scheduled-at": instant(delivery.scheduled_at),
            "timebell-attempt": str(delivery.attempt),
            **tracing.outgoing(),
        }
        if options.get("ack") == "reported":
            url = f"{self._server}/api/v1/jobs/{delivery.job_id}"
            token = token_of(self._secret_key, delivery.job_id, delivery.attempt)
            report = {"url": url, "token": token}
            headers |= {"timebell-report-url": url, "timebell-token": token}
        body = bodies.render(delivery, options, "plain", report)
        return Message(message_id(delivery), body.value, body.data, delivery, headers)

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """The message that would be published; nobody could pass it off as one: its token opens nothing.

        Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE).
        """
        report = bodies.SAMPLE_REPORT if options.get("ack") == "reported" else None
        return {
            "messageId": message_id(delivery),
            "body": bodies.render(delivery, options, "plain", report).data.decode(),
        }

    def _connection(self, options: dict[str, Any]) -> str:
        name = options.get("connection", "")
        if "connection" in options and not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise invalid("connection is not a name.", "Name one that the operator has set; no target has its URL.")
        if (url := self._urls.get(name)) is None:
            setting = f"TIMEBELL_BROKER_{self.kind.upper().replace('-', '_')}_URL"
            called, how = (f" {name}", f" to have {name}=<its URL>") if name else ("", "")
            raise Refused(
                f"There is no connection{called} for the target {self.kind}.", code="BROKER_NOT_CONFIGURED",
                fix=f"Set {setting}{how}, where jobs are made and on the nodes that deliver them.",
            )  # fmt: skip
        return url


def urls(setting: str | None) -> dict[str, str]:
    """The URLs in a setting, by name: `redis://one mail=redis://two` are "" and "mail"."""
    first, *named = _NAMED.split(f" {setting or ''}")
    found = dict(zip(named[::2], map(str.strip, named[1::2]), strict=True))
    return found | ({"": first.strip()} if first.strip() else {})


def unreachable(why: str) -> Outcome:
    """The queue did not answer; `why` holds no address."""
    outcome = Outcome.failed("BROKER_UNREACHABLE", f"The queue cannot be reached: {why}.")
    outcome.counts = False
    return outcome


def refused(why: str) -> Outcome:
    """The queue does not let us in."""
    outcome = Outcome.failed("BROKER_REFUSED", f"The queue refuses Timebell: {why}. Correct the connection's URL.")
    outcome.counts = False
    return outcome


def message_refused(why: str) -> Outcome:
    """The queue does not take this message as things are."""
    return Outcome.failed("MESSAGE_REFUSED", f"The queue does not take the message: {why}.")


def too_large(size: int, limit: int) -> Outcome:
    """The message cannot go through, now or later."""
    why = f"The message has {size} bytes; the queue takes {limit}. Keep large content elsewhere, and send its address."
    return Outcome.failed("MESSAGE_TOO_LARGE", why, retryable=False)


def word(options: dict[str, Any], name: str, default: str | None = None, longest: int = 200) -> str:
    """An option that is a name: printable, without spaces at its ends. Raises InvalidInput."""
    value = options.get(name, default)
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable() or value != value.strip():
        raise invalid(f"{name} is {value!r:.60}; it is a text of 1 to {longest} printable characters.")
    return value


def invalid(message: str, fix: str = "") -> InvalidInput:
    """TARGET_OPTIONS_INVALID."""
    return InvalidInput(message, code="TARGET_OPTIONS_INVALID", fix=fix)
