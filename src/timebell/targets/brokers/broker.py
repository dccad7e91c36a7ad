"""Base class of broker targets: options, message, confirmation, and the outcomes of failures."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from timebell import tracing
from timebell.errors import InvalidInput, InvalidPayload, Refused
from timebell.targets import bodies
from timebell.targets.base import Delivery, Outcome, format_utc, message_id, reject_unknown_options
from timebell.tenancy.tokens import attempt_token

CONFIRM_SECONDS = 10.0
ACK_MODES = ("published", "reported")
_CONNECTION_NAME = re.compile(r"[a-z][a-z0-9-]{0,29}")
_NAMED_URL = re.compile(rf"\s({_CONNECTION_NAME.pattern})=(?=[a-z][a-z0-9+.-]*://)")


@dataclass(frozen=True, slots=True)
class Message:
    """A message for the queue: an id for deduplication, a body, headers, and its delivery."""

    id: str
    body: Any
    data: bytes
    """The body as JSON."""
    delivery: Delivery
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the body as JSON."""
        return self.data


class BrokerError(Exception):
    """A failed publish, with its outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        super().__init__(outcome.error)


class Broker(ABC):
    """A target that publishes to a queue, at the operator's default URL or the one named by the option `connection`.

    A kind lists its own options in `option_names` (besides `connection`, `ack` and the body options), validates them in
    `check_own_options`, publishes in `publish`, and maps errors of its library in `outcome_of_error`. One instance
    serves many concurrent deliveries, with one connection per URL that stays open until `close`.
    """

    kind: str
    option_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, url: str | None, *, server: str, secret_key: str | None) -> None:
        self._urls = parse_urls(url)
        self._server = server.rstrip("/")
        self._secret_key = secret_key

    @abstractmethod
    def check_own_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate the kind's own options; return their normal form. Raises InvalidInput (INVALID_TARGET_OPTIONS)."""

    @abstractmethod
    async def publish(self, url: str, message: Message, options: dict[str, Any]) -> dict[str, Any] | Outcome:
        """Publish a message and wait for the confirmation of the queue.

        Returns JSON to be stored as the job's result, or an outcome if publishing was unnecessary.
        """

    @abstractmethod
    def outcome_of_error(self, error: Exception) -> Outcome | None:
        """Map an error of the client library: `unreachable()`, `refused()`, ...; None for a bug in the target."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections."""

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate options.

        Raises InvalidInput (INVALID_TARGET_OPTIONS) or Refused (BROKER_NOT_CONFIGURED, SECRET_KEY_MISSING).
        """
        reject_unknown_options(options, {"ack", "connection", *bodies.OPTIONS} | self.option_names)
        self._connection_url(options)
        connection = {"connection": options["connection"]} if "connection" in options else {}
        ack, body = options.get("ack", "published"), bodies.check_options(options, "plain")
        if ack not in ACK_MODES:
            raise invalid(f"ack cannot be {ack!r:.60}.", "Use published or reported.")
        if ack == "reported":
            attempt_token(self._secret_key, "", 0)  # raises if the secret key is missing
        return {"ack": ack, **connection, **body, **self.check_own_options(options)}

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Publish the message. The package docstring lists the failure codes.

        An interrupted publish may have succeeded; the message id lets the consumer detect the duplicate.
        """
        try:
            url, message = self._connection_url(options), self.build_message(delivery, options)
        except (InvalidPayload, Refused) as refusal:  # the body, connection or token is unavailable here
            return Outcome.failed(refusal.code, str(refusal), retryable=False)
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                result = await self.publish(url, message, options)
        except BrokerError as failure:
            return failure.outcome
        except TimeoutError:
            return unreachable(f"no confirmation within {CONFIRM_SECONDS:g} s")
        except Exception as error:
            outcome = self.outcome_of_error(error)
            if outcome is None:
                raise
            return outcome
        if isinstance(result, Outcome):
            return result
        outcome = Outcome.ok({"messageId": message.id} | result)
        outcome.awaits_report = options.get("ack") == "reported"
        return outcome

    def build_message(self, delivery: Delivery, options: dict[str, Any]) -> Message:
        """Build the message of a delivery. Raises Refused (SECRET_KEY_MISSING), InvalidPayload (INVALID_BODY, ...)."""
        report = None
        headers = {
            "timebell-job-id": delivery.job_id,
            "timebell-topic": delivery.topic,
            "timebell-occurrence-key": delivery.occurrence_key,
            "timebell-scheduled-at": format_utc(delivery.scheduled_at),
            "timebell-attempt": str(delivery.attempt),
            **tracing.outgoing_headers(),
        }
        if options.get("ack") == "reported":
            url = f"{self._server}/api/v1/jobs/{delivery.job_id}"
            token = attempt_token(self._secret_key, delivery.job_id, delivery.attempt)
            report = {"url": url, "token": token}
            headers |= {"timebell-report-url": url, "timebell-token": token}
        body = bodies.render(delivery, options, "plain", report)
        return Message(message_id(delivery), body.value, body.data, delivery, headers)

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """Return the message that would be published, with a placeholder instead of its token.

        Raises InvalidPayload (INVALID_BODY, MESSAGE_TOO_LARGE).
        """
        report = bodies.SAMPLE_REPORT if options.get("ack") == "reported" else None
        return {
            "messageId": message_id(delivery),
            "body": bodies.render(delivery, options, "plain", report).data.decode(),
        }

    def _connection_url(self, options: dict[str, Any]) -> str:
        name = options.get("connection", "")
        if "connection" in options and not (isinstance(name, str) and _CONNECTION_NAME.fullmatch(name)):
            raise invalid(
                "connection must be a name.", "Use the name of a configured connection; targets cannot specify URLs."
            )
        if (url := self._urls.get(name)) is None:
            setting = f"TIMEBELL_BROKER_{self.kind.upper().replace('-', '_')}_URL"
            name_part, fix_part = (f" {name}", f" to include {name}=<its URL>") if name else ("", "")
            raise Refused(
                f"No connection{name_part} is configured for the target {self.kind}.", code="BROKER_NOT_CONFIGURED",
                fix=f"Set {setting}{fix_part}, where jobs are created and on the nodes that deliver them.",
            )  # fmt: skip
        return url


def parse_urls(setting: str | None) -> dict[str, str]:
    """Parse the URLs of a setting by name: `redis://one mail=redis://two` has the names "" and "mail"."""
    default, *named_parts = _NAMED_URL.split(f" {setting or ''}")
    urls = dict(zip(named_parts[::2], map(str.strip, named_parts[1::2]), strict=True))
    return urls | ({"": default.strip()} if default.strip() else {})


def unreachable(reason: str) -> Outcome:
    """Return the outcome for a queue that did not respond; `reason` must contain no address."""
    outcome = Outcome.failed("BROKER_UNREACHABLE", f"The queue is unreachable: {reason}.")
    outcome.uses_attempt = False
    return outcome


def refused(reason: str) -> Outcome:
    """Return the outcome for a queue that rejects the credentials or permissions."""
    outcome = Outcome.failed(
        "BROKER_REFUSED", f"The queue refuses the connection: {reason}. Correct the connection URL."
    )
    outcome.uses_attempt = False
    return outcome


def message_refused(reason: str) -> Outcome:
    """Return the outcome for a message that the queue rejects under the current conditions."""
    return Outcome.failed("MESSAGE_REFUSED", f"The queue rejected the message: {reason}.")


def too_large(size: int, limit: int) -> Outcome:
    """Return the final outcome for a message above the size limit of the queue, in bytes."""
    error = f"The message has {size} bytes; the limit is {limit}. Store large content elsewhere and send a reference."
    return Outcome.failed("MESSAGE_TOO_LARGE", error, retryable=False)


def text_option(options: dict[str, Any], name: str, default: str | None = None, max_length: int = 200) -> str:
    """Return a text option: printable, without leading or trailing spaces.

    Raises InvalidInput (INVALID_TARGET_OPTIONS).
    """
    value = options.get(name, default)
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= max_length
        or not value.isprintable()
        or value != value.strip()
    ):
        raise invalid(f"{name} is {value!r:.60}; it must be a string of 1 to {max_length} printable characters.")
    return value


def invalid(message: str, fix: str = "") -> InvalidInput:
    """Return the error for an invalid option (INVALID_TARGET_OPTIONS)."""
    return InvalidInput(message, code="INVALID_TARGET_OPTIONS", fix=fix)
