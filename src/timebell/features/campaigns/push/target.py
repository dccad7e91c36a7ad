"""Deliver push notifications: one message to at most 500 devices, or to a topic or condition, with a result for each.

The results are stored in the attempt records, so a later attempt sends only to recipients without a final result. For
an `unknown` result, the job's options decide: send again with the same tag, so that a phone that already has the
message shows it only once; or leave it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from timebell.errors import InvalidInput, Refused
from timebell.features.campaigns.push import message
from timebell.features.campaigns.push.appearance import APPEARANCE_OPTIONS
from timebell.features.campaigns.push.message import Content, EncodedContent, Message, RecipientKind
from timebell.features.campaigns.push.provider import Provider, PushResult, SendOutcome
from timebell.model import mapping
from timebell.model.mapping import FieldMapping
from timebell.targets import bodies
from timebell.targets.arrived import Snooze
from timebell.targets.base import Delivery, Outcome, event_fields, reject_unknown_options

log = logging.getLogger("timebell.push")

MAX_TOKENS = 500
RECIPIENT_KINDS: dict[str, RecipientKind] = {"tokens": "token", "topic": "topic", "condition": "condition"}
TEMPLATE_OPTIONS = (
    "tokens",
    "topic",
    "condition",
    "userId",
    "title",
    "body",
    "data",
    "ttl",
    "collapseKey",
    "notificationId",
    *APPEARANCE_OPTIONS,
)
OPTIONS = (*TEMPLATE_OPTIONS, "fields", "unknown")
SAMPLE_DEVICE = "the-token-of-a-device"
FINAL_OUTCOMES = (SendOutcome.ACCEPTED, SendOutcome.REFUSED)
MIN_SNOOZE_SECONDS = 1.0


class DeviceRegistry(Protocol):
    """The devices of users, and the notifications they have received."""

    async def devices(self, tenant_id: str, user_id: str) -> list[tuple[str, str]]:
        """Return (id, token) of a user's devices that accept pushes."""

    async def accepted(self, tenant_id: str, notification_id: str) -> set[str]:
        """Return the ids of the devices for which a notification was accepted, by any job."""

    async def record(
        self, tenant_id: str, notification_id: str | None, accepted: list[str], dead: list[tuple[str, str]]
    ) -> None:
        """Record the device ids for which a notification was accepted, and remove dead devices (id, token)."""


class PushTarget:
    """Sends push notifications.

    Options: one of `tokens`, `topic`, `condition` and `userId` (the devices of that user); `title`, `body`, `data`,
    `ttl` (seconds), `collapseKey`, `notificationId` and those of appearance.py, all of which may contain placeholders
    (`timebell.model.mapping`); `fields`: adds the payload's fields to `data`, for example
    `{"rename": {"bible_code": "bibleCode"}}`; `unknown`: "retry" (default) or "leave".

    `provider` creates the provider on first use. `now` returns an aware datetime. `registry` is set by processes that
    have one, and required for `userId`.
    """

    kind = "push"
    registry: DeviceRegistry | None = None

    def __init__(self, provider: Callable[[], Provider], now: Callable[[], datetime]) -> None:
        self._create_provider, self._now = provider, now
        self._provider: Provider | None = None
        self._warming: asyncio.Task[PushResult | None] | None = None

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate options.

        Raises InvalidInput (INVALID_TARGET_OPTIONS, INVALID_TEMPLATE, INVALID_PUSH_MESSAGE, ...).
        """
        reject_unknown_options(options, OPTIONS)
        options = {name: value for name, value in options.items() if value is not None}
        if sum(name in options for name in (*RECIPIENT_KINDS, "userId")) != 1:
            raise _invalid_options("Specify exactly one of: tokens, topic, condition, userId.")
        if options.get("unknown", "retry") not in ("retry", "leave"):
            raise _invalid_options("unknown must be retry or leave.")
        _parse_fields(options)
        document = {name: options[name] for name in TEMPLATE_OPTIONS if name in options}
        mapping.check_template(document, bodies.TEMPLATE_NAMES)
        if "fields" not in options and not _has_placeholders(
            document
        ):  # without placeholders the message can be validated now
            _parse_document(_with_sample_token(document), {}, "")
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Send to all recipients without a final result.

        Failure codes: PUSH_REFUSED, PUSH_UNKNOWN, PUSH_INCOMPLETE, USER_WITHOUT_DEVICES; and those of an
        invalid message.
        """
        try:
            user, options = await self._resolve_user(delivery, options)
            kind, recipients, content, notification = prepare_message(delivery, options)
        except InvalidInput as error:
            return Outcome.failed(error.code, error.message, retryable=False)
        chunk = _ChunkResults(delivery, len(recipients), leave_unknown=options.get("unknown") == "leave", user=user)
        encoded, remaining = EncodedContent(content, self._now()), chunk.unsettled
        try:
            provider = self.provider()
        except (InvalidInput, Refused) as error:  # an operator has to fix the node; then the retry succeeds
            return Outcome.failed(error.code, str(error))
        try:
            if remaining:
                messages = [Message(kind, recipients[index], encoded) for index in remaining]
                await provider.send(messages, lambda n, result: chunk.record(remaining[n], result))
        finally:
            delivery.progress = chunk.progress()
            if user is not None and self.registry is not None:
                dead = [(user.ids[n], recipients[n]) for n in chunk.dead_token_indexes()]
                accepted = [user.ids[n] for n in chunk.accepted_indexes()]
                await asyncio.shield(self.registry.record(delivery.tenant_id, user.notification_id, accepted, dead))
            summary = chunk.summary()
            log.info(
                "push %s: sent to %d of %d tokens, %s", notification, len(remaining), len(recipients), summary,
                extra={"event": "push.chunk", "job_id": delivery.job_id, "attempt": delivery.attempt,
                       "notification_id": notification, "user_id": user and user.user_id,
                       "tokens": len(recipients), "status": summary},
            )  # fmt: skip
        return chunk.outcome()

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """Return the exact request to the first recipient, and the number of requests. Raises as `prepare_message`."""
        kind, recipients, content, _ = prepare_message(delivery, _with_sample_token(options))
        body = Message(kind, recipients[0], EncodedContent(content, self._now())).request()
        return {"requests": len(recipients), "body": body.decode()}

    async def _resolve_user(
        self, delivery: Delivery, options: dict[str, Any]
    ) -> tuple[_UserDevices | None, dict[str, Any]]:  # fmt: skip
        """For a `userId`, return the user's devices and the options with their tokens; otherwise (None, options).

        Raises InvalidInput (USER_WITHOUT_DEVICES), InvalidPayload.
        """
        if "userId" not in options:
            return None, options
        templates = {name: options[name] for name in ("userId", "notificationId") if name in options}
        filled = mapping.fill_template(templates, event_fields(delivery))
        user_id, notification = filled["userId"], filled.get("notificationId")
        if not isinstance(user_id, str) or self.registry is None:
            raise _invalid_options(f"userId is {user_id!r:.60}; it must be a string.")
        tokens = dict(await self.registry.devices(delivery.tenant_id, user_id))
        progress_records = [line["progress"] for line in delivery.previous_attempts if "progress" in line]
        previous_ids: list[str] = progress_records[-1].get("devices", []) if progress_records else []
        ids = previous_ids or list(tokens)
        if not ids:
            raise InvalidInput(
                f"{user_id:.60} has no device that accepts pushes.", code="USER_WITHOUT_DEVICES",
                fix="Register a device: POST /devices.",
            )  # fmt: skip
        accepted = set() if notification is None else await self.registry.accepted(delivery.tenant_id, notification)
        user = _UserDevices(ids, {n for n, id_ in enumerate(ids) if id_ not in tokens},
                         {n for n, id_ in enumerate(ids) if id_ in accepted}, notification, user_id)  # fmt: skip
        recipients = [tokens.get(id_, f"gone-{id_}") for id_ in ids]
        return user, {**{name: value for name, value in options.items() if name != "userId"}, "tokens": recipients}

    def provider(self) -> Provider:
        """Return the provider, created on first use. Raises InvalidInput, Refused."""
        if self._provider is None:
            self._provider = self._create_provider()
        return self._provider

    def warm(self) -> None:
        """Start to prepare what the first message would wait for. Raises as `provider`."""
        self._warming = asyncio.get_running_loop().create_task(self.provider().ready())

    async def close(self) -> None:
        """Cancel the preparation and close the provider."""
        if self._warming is not None:
            self._warming.cancel()
        if self._provider is not None:
            await self._provider.close()
            self._provider = None


@dataclass(frozen=True, slots=True)
class _UserDevices:
    """A user's device ids; the indexes of removed devices, and of those that already received the notification."""

    ids: list[str]
    removed: set[int]
    already_notified: set[int]
    notification_id: str | None
    user_id: str


def _with_sample_token(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a `userId` by a sample token, for previews and checks."""
    other_options = {name: value for name, value in options.items() if name != "userId"}
    return {**other_options, "tokens": [SAMPLE_DEVICE]} if "userId" in options else other_options


def check_renders(delivery: Delivery, options: Mapping[str, Any]) -> None:
    """Check that a message can be prepared; for a `userId`, with a sample token. Raises as `prepare_message`."""
    if "userId" in options:
        mapping.fill_template({"userId": options["userId"]}, event_fields(delivery))
    prepare_message(delivery, _with_sample_token(options))


def prepare_message(delivery: Delivery, options: Mapping[str, Any]) -> tuple[RecipientKind, list[str], Content, str]:
    """Fill in the options of a delivery; return recipient kind, recipients, content and notification id.

    Raises InvalidInput, as `check`, and InvalidPayload (INVALID_BODY) for missing payload fields.
    """
    document = mapping.fill_template(
        {name: options[name] for name in TEMPLATE_OPTIONS if name in options}, event_fields(delivery)
    )
    fields = _parse_fields(options)
    data = {} if fields is None else fields.apply(delivery.payload)
    return _parse_document(document, data, delivery.occurrence_key)


def _parse_document(
    document: dict[str, Any], data: dict[str, Any], default_notification_id: str
) -> tuple[RecipientKind, list[str], Content, str]:
    name, kind = next((name, kind) for name, kind in RECIPIENT_KINDS.items() if name in document)
    values = document[name] if name == "tokens" else [document[name]]
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_TOKENS:
        raise _invalid_options(f"tokens must be a list of 1 to {MAX_TOKENS}.")
    recipients = list(dict.fromkeys(message.check_recipient(kind, item) for item in values))
    own_data = document.get("data", {})
    if not isinstance(own_data, dict):
        raise _invalid_options("data must be an object of strings.")
    texts: dict[str, str | None] = {}
    for item in ("title", "body", "collapseKey", "notificationId"):
        texts[item] = document.get(item)
        if not isinstance(texts[item], str | None):
            raise _invalid_options(f"{item} must be a string.")
    ttl = document.get("ttl")
    if ttl is not None and (not isinstance(ttl, int) or isinstance(ttl, bool)):
        raise _invalid_options("ttl must be a whole number of seconds.")
    notification = texts["notificationId"] or default_notification_id
    data = {**data, **own_data}
    if texts["notificationId"] is not None:
        data.setdefault("notificationId", notification)
    tag = texts["collapseKey"] or notification
    if len(tag.encode()) > message.MAX_TAG_BYTES:
        tag = hashlib.sha256(tag.encode()).hexdigest()
    appearance = {name: document[name] for name in APPEARANCE_OPTIONS if document.get(name) is not None}
    content = Content(texts["title"], texts["body"], data, ttl, texts["collapseKey"], tag or None, appearance)
    message.check_content(content, kind)
    return kind, recipients, content, notification


class _ChunkResults:
    """The result of each recipient, over all attempts so far."""

    def __init__(self, delivery: Delivery, size: int, *, leave_unknown: bool, user: _UserDevices | None = None) -> None:
        self._leave_unknown = leave_unknown
        self._user = user
        self._outcomes: list[dict[str, Any] | None] = [None] * size
        self._results: dict[int, PushResult] = {}
        self._restore_progress(delivery, size)
        for index in () if user is None else user.removed:
            self._outcomes[index] = self._final_outcome(index) or {"outcome": "refused", "code": "DEVICE_REMOVED"}
        for index in () if user is None else user.already_notified:
            self._outcomes[index] = self._final_outcome(index) or {"outcome": "accepted", "code": "ALREADY_ACCEPTED"}
        settled = [*FINAL_OUTCOMES, SendOutcome.UNKNOWN] if leave_unknown else FINAL_OUTCOMES
        self.unsettled = [
            n for n, outcome in enumerate(self._outcomes) if outcome is None or outcome["outcome"] not in settled
        ]

    def _restore_progress(self, delivery: Delivery, size: int) -> None:
        earlier = delivery.previous_attempts
        last_delivered = max((n for n, line in enumerate(earlier, 1) if line.get("code") is None), default=0)
        earlier = earlier[last_delivered:]  # a manual retry of a delivered job starts again
        with_progress = [line for line in earlier if "progress" in line]
        if with_progress and len(outcomes := with_progress[-1]["progress"]["targets"]) == size:
            self._outcomes = list(outcomes)
        later = earlier[earlier.index(with_progress[-1]) + 1 :] if with_progress else earlier
        if any(line.get("code") == "LEASE_LOST" for line in later):  # the node may have died while sending
            unknown = {"outcome": SendOutcome.UNKNOWN.value, "code": "LEASE_LOST"}
            self._outcomes = [
                outcome if outcome is not None and outcome["outcome"] in FINAL_OUTCOMES else dict(unknown)
                for outcome in self._outcomes
            ]

    def record(self, index: int, result: PushResult) -> None:
        """Record the result of a recipient: the provider's `on_result`."""
        fields = {
            "outcome": result.outcome.value,
            "id": result.id,
            "code": result.code,
            "remove": result.token_is_dead or None,
        }
        self._results[index] = result
        self._outcomes[index] = {name: value for name, value in fields.items() if value is not None}

    def progress(self) -> dict[str, Any]:
        """Return JSON: the count of each outcome, and the outcome of each recipient in order (null: never sent)."""
        fields = {**self._counts(), "targets": self._outcomes}
        return fields if self._user is None else {**fields, "devices": self._user.ids}

    def accepted_indexes(self) -> list[int]:
        """Return the indexes of recipients accepted in this attempt."""
        return [index for index, result in self._results.items() if result.outcome is SendOutcome.ACCEPTED]

    def dead_token_indexes(self) -> list[int]:
        """Return the indexes of recipients with a dead token."""
        return [index for index, result in self._results.items() if result.token_is_dead]

    def _final_outcome(self, index: int) -> dict[str, Any] | None:
        outcome = self._outcomes[index]
        return outcome if outcome is not None and outcome["outcome"] in FINAL_OUTCOMES else None

    def summary(self) -> str:
        """Return the counts as text: `498 accepted, 2 refused (UNREGISTERED)`."""
        parts = []
        for outcome in SendOutcome:
            codes = Counter(entry.get("code") for entry in self._with_outcome(outcome))
            if codes:
                names = ", ".join(sorted(code for code in codes if code))
                parts.append(f"{codes.total()} {outcome}" + (f" ({names})" if names else ""))
        unsent = self._outcomes.count(None)
        return ", ".join([*parts, f"{unsent} not sent"] if unsent else parts)

    def outcome(self) -> Outcome:
        """Return the outcome of the attempt. Raises Snooze if all remaining messages only wait for quota."""
        counts, summary = self._counts(), f"{self.summary()}."
        retryable = [result for result in self._results.values() if result.outcome is SendOutcome.RETRY]
        retries_unknown = bool(counts["unknown"]) and not self._leave_unknown
        if retryable:
            retry_after = max((result.retry_after or 0.0 for result in retryable), default=0.0)
            if all(result.uncounted for result in retryable) and not retries_unknown:
                raise Snooze(max(retry_after, MIN_SNOOZE_SECONDS))
            return Outcome.failed("PUSH_INCOMPLETE", summary, retry_after=retry_after or None)
        if retries_unknown:
            return Outcome.failed("PUSH_UNKNOWN", summary)
        if counts["accepted"]:
            return Outcome.ok(self.progress())
        if counts["unknown"]:
            return Outcome.failed("PUSH_UNKNOWN", summary, retryable=False)
        return Outcome.failed("PUSH_REFUSED", summary, retryable=False)

    def _with_outcome(self, outcome: SendOutcome) -> list[dict[str, Any]]:
        return [entry for entry in self._outcomes if entry is not None and entry["outcome"] == outcome]

    def _counts(self) -> dict[str, int]:
        return {outcome.value: len(self._with_outcome(outcome)) for outcome in SendOutcome}


def _parse_fields(options: Mapping[str, Any]) -> FieldMapping | None:
    """Parse the `fields` option. Raises InvalidInput (INVALID_TARGET_OPTIONS)."""
    fields = options.get("fields")
    if fields is None:
        return None
    rename = fields.get("rename", {}) if isinstance(fields, dict) and not fields.keys() - {"rename"} else None
    if not isinstance(rename, dict) or not all(isinstance(new_name, str) and new_name for new_name in rename.values()):
        raise _invalid_options(
            'fields must be like {"rename": {"bible_code": "bibleCode"}}; all values are sent as strings.'
        )
    if len(set(rename.values())) < len(rename):
        raise _invalid_options("fields.rename maps two fields to one name.")
    return FieldMapping(rename, strings=True)


def _has_placeholders(document: Any) -> bool:
    if isinstance(document, str):
        return "{{" in document
    children = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return any(map(_has_placeholders, children))


def _invalid_options(reason: str) -> InvalidInput:
    return InvalidInput(reason, code="INVALID_TARGET_OPTIONS", fix="See docs/guides/push.md.")
