"""Deliver by push: one message to at most 500 devices, or to a topic or condition, with what became of each.

What earlier attempts of the job came to is in their records, so another attempt sends only to those that nobody can
say have it. Where nobody knows (`unknown`), the job's options decide: send once more, under the same tag, so that a
phone that has it shows it once; or leave it.
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
from timebell.model import mapping
from timebell.model.mapping import Fields
from timebell.targets import bodies
from timebell.targets.base import Delivery, Outcome, facts, only
from timebell.targets.handler import Snooze
from timebell.targets.push import message
from timebell.targets.push.message import Content, Encoded, Message, To
from timebell.targets.push.provider import Answer, Fate, Provider

log = logging.getLogger("timebell.push")

MOST_TOKENS = 500
KINDS: dict[str, To] = {"tokens": "token", "topic": "topic", "condition": "condition"}
FILLED = ("tokens", "topic", "condition", "userId", "title", "body", "data", "ttl", "collapseKey", "notificationId")
OPTIONS = (*FILLED, "fields", "unknown")
ANYONE = "the-token-of-a-device"
SETTLED = (Fate.ACCEPTED, Fate.REFUSED)
SHORTEST_SNOOZE = 1.0


class Registry(Protocol):
    """Whose which device is, and which notifications they have."""

    async def devices(self, tenant_id: str, user_id: str) -> list[tuple[str, str]]:
        """(id, token) of a person's devices that take pushes."""

    async def accepted(self, tenant_id: str, notification_id: str) -> set[str]:
        """The ids of the devices that a notification was accepted for, by whatever job."""

    async def record(
        self, tenant_id: str, notification_id: str | None, accepted: list[str], dead: list[tuple[str, str]]
    ) -> None:
        """A notification was accepted for these; these (id, token) are gone."""


class PushTarget:
    """Options: one of `tokens`, `topic`, `condition` and `userId` (that person's devices); `title`, `body`, `data`,
    `ttl` (seconds), `collapseKey` and `notificationId`, all of which may hold placeholders (`timebell.model.mapping`);
    `fields`: what of the payload becomes `data`, as `{"rename": {"bible_code": "bibleCode"}}`; `unknown`: "retry"
    (default) or "leave".

    `provider` is made when it is first needed. `now` is aware. `registry` is given by whoever has one.
    """

    kind = "push"
    registry: Registry | None = None

    def __init__(self, provider: Callable[[], Provider], now: Callable[[], datetime]) -> None:
        self._make, self._now = provider, now
        self._provider: Provider | None = None
        self._warming: asyncio.Task[None] | None = None

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Raises InvalidInput (TARGET_OPTIONS_INVALID, TEMPLATE_INVALID, PUSH_MESSAGE_INVALID, ...)."""
        only(options, OPTIONS)
        options = {name: value for name, value in options.items() if value is not None}
        if sum(name in options for name in (*KINDS, "userId")) != 1:
            raise _unfit("A push goes to one of: tokens, topic, condition, userId.")
        if options.get("unknown", "retry") not in ("retry", "leave"):
            raise _unfit("unknown is retry or leave.")
        _fields(options)
        document = {name: options[name] for name in FILLED if name in options}
        mapping.check(document, bodies.NAMES)
        if "fields" not in options and not _has_places(document):  # all there is to know is known
            _read(_to_anyone(document), {}, "")
        return options

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Codes of failure: PUSH_REFUSED, PUSH_UNKNOWN, PUSH_INCOMPLETE, USER_WITHOUT_DEVICES, and those of the message
        itself."""
        try:
            person, options = await self._person(delivery, options)
            kind, targets, content, notification = prepared(delivery, options)
        except InvalidInput as unfit:
            return Outcome.failed(unfit.code, unfit.message, retryable=False)
        chunk = _Chunk(delivery, len(targets), leave=options.get("unknown") == "leave", person=person)
        encoded, left = Encoded(content, self._now()), chunk.left
        try:
            provider = self.provider()
        except (InvalidInput, Refused) as unusable:  # mended by whoever runs this node, and then tried again
            return Outcome.failed(unusable.code, str(unusable))
        try:
            if left:
                messages = [Message(kind, targets[place], encoded) for place in left]
                await provider.send(messages, lambda n, answer: chunk.tell(left[n], answer))
        finally:
            delivery.progress = chunk.result()
            if person is not None and self.registry is not None:
                dead = [(person.ids[n], targets[n]) for n in chunk.dead()]
                got = [person.ids[n] for n in chunk.accepted()]
                await asyncio.shield(self.registry.record(delivery.tenant_id, person.notification, got, dead))
            says = chunk.says()
            log.info(
                "push %s: %d of %d tokens sent to, %s", notification, len(left), len(targets), says,
                extra={"event": "push.chunk", "job_id": delivery.job_id, "attempt": delivery.attempt,
                       "notification_id": notification, "user_id": person and person.user_id,
                       "tokens": len(targets), "status": says},
            )  # fmt: skip
        return chunk.outcome()

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """The request to the first of the targets, to the letter, and how many there are. Raises as `prepared`."""
        kind, targets, content, _ = prepared(delivery, _to_anyone(options))
        body = Message(kind, targets[0], Encoded(content, self._now())).request()
        return {"requests": len(targets), "body": body.decode()}

    async def _person(
        self, delivery: Delivery, options: dict[str, Any]
    ) -> tuple[_Person | None, dict[str, Any]]:  # fmt: skip
        """Whose devices it goes to, if to a person's, and the options with their tokens.

        Raises InvalidInput (USER_WITHOUT_DEVICES), InvalidPayload.
        """
        if "userId" not in options:
            return None, options
        said = {name: options[name] for name in ("userId", "notificationId") if name in options}
        known = mapping.fill(said, facts(delivery))
        user_id, notification = known["userId"], known.get("notificationId")
        if not isinstance(user_id, str) or self.registry is None:
            raise _unfit(f"userId is {user_id!r:.60}, and is a text.")
        tokens = dict(await self.registry.devices(delivery.tenant_id, user_id))
        sent = [line["progress"] for line in delivery.earlier if "progress" in line]
        before: list[str] = sent[-1].get("devices", []) if sent else []
        ids = before or list(tokens)
        if not ids:
            raise InvalidInput(
                f"{user_id:.60} has no device that takes pushes.", code="USER_WITHOUT_DEVICES",
                fix="Register one: POST /devices.",
            )  # fmt: skip
        has = set() if notification is None else await self.registry.accepted(delivery.tenant_id, notification)
        person = _Person(ids, {n for n, id_ in enumerate(ids) if id_ not in tokens},
                         {n for n, id_ in enumerate(ids) if id_ in has}, notification, user_id)  # fmt: skip
        to = [tokens.get(id_, f"gone-{id_}") for id_ in ids]
        return person, {**{name: value for name, value in options.items() if name != "userId"}, "tokens": to}

    def provider(self) -> Provider:
        """What sends, made when it is first needed. Raises InvalidInput, Refused."""
        if self._provider is None:
            self._provider = self._make()
        return self._provider

    def warm(self) -> None:
        """Begin with what a first message would wait for. Raises as `provider`."""
        self._warming = asyncio.get_running_loop().create_task(self.provider().ready())

    async def close(self) -> None:
        """As in Target."""
        if self._warming is not None:
            self._warming.cancel()
        if self._provider is not None:
            await self._provider.close()
            self._provider = None


@dataclass(frozen=True, slots=True)
class _Person:
    """The ids of a person's devices; the places of those that are gone by now, and of those that have it already."""

    ids: list[str]
    gone: set[int]
    have: set[int]
    notification: str | None
    user_id: str


def _to_anyone(options: Mapping[str, Any]) -> dict[str, Any]:
    """A push to a person as one to a device, to be looked at."""
    rest = {name: value for name, value in options.items() if name != "userId"}
    return {**rest, "tokens": [ANYONE]} if "userId" in options else rest


def check_fit(delivery: Delivery, options: Mapping[str, Any]) -> None:
    """Raises as `prepared`, also for a push to a person, whose devices are found when it is sent."""
    if "userId" in options:
        mapping.fill({"userId": options["userId"]}, facts(delivery))
    prepared(delivery, _to_anyone(options))


def prepared(delivery: Delivery, options: Mapping[str, Any]) -> tuple[To, list[str], Content, str]:
    """To what kind of targets, to which, what is sent, and the notification's id.

    Raises InvalidInput, as `check`, and InvalidPayload (BODY_UNFIT) for what the payload lacks.
    """
    document = mapping.fill({name: options[name] for name in FILLED if name in options}, facts(delivery))
    fields = _fields(options)
    data = {} if fields is None else fields.of(delivery.payload)
    return _read(document, data, delivery.occurrence_key)


def _read(document: dict[str, Any], data: dict[str, Any], key: str) -> tuple[To, list[str], Content, str]:
    name, kind = next((name, kind) for name, kind in KINDS.items() if name in document)
    given = document[name] if name == "tokens" else [document[name]]
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_TOKENS:
        raise _unfit(f"tokens is a list of 1 to {MOST_TOKENS}.")
    targets = list(dict.fromkeys(message.check_to(kind, each) for each in given))
    more = document.get("data", {})
    if not isinstance(more, dict):
        raise _unfit("data is an object of strings.")
    texts: dict[str, str | None] = {}
    for each in ("title", "body", "collapseKey", "notificationId"):
        texts[each] = document.get(each)
        if not isinstance(texts[each], str | None):
            raise _unfit(f"{each} is a string.")
    ttl = document.get("ttl")
    if ttl is not None and (not isinstance(ttl, int) or isinstance(ttl, bool)):
        raise _unfit("ttl is a whole number of seconds.")
    notification = texts["notificationId"] or key
    data = {**data, **more}
    if texts["notificationId"] is not None:
        data.setdefault("notificationId", notification)
    tag = texts["collapseKey"] or notification
    if len(tag.encode()) > message.LONGEST_TAG:
        tag = hashlib.sha256(tag.encode()).hexdigest()
    content = Content(texts["title"], texts["body"], data, ttl, texts["collapseKey"], tag or None)
    message.check(content, kind)
    return kind, targets, content, notification


class _Chunk:
    """What became of each of the targets, over all attempts so far."""

    def __init__(self, delivery: Delivery, size: int, *, leave: bool, person: _Person | None = None) -> None:
        self._leave = leave
        self._person = person
        self._known: list[dict[str, Any] | None] = [None] * size
        self._answers: dict[int, Answer] = {}
        self._recall(delivery, size)
        for place in () if person is None else person.gone:
            self._known[place] = self._settled(place) or {"fate": "refused", "code": "DEVICE_REMOVED"}
        for place in () if person is None else person.have:
            self._known[place] = self._settled(place) or {"fate": "accepted", "code": "ACCEPTED_BEFORE"}
        settled = [*SETTLED, Fate.UNKNOWN] if leave else SETTLED
        self.left = [n for n, known in enumerate(self._known) if known is None or known["fate"] not in settled]

    def _recall(self, delivery: Delivery, size: int) -> None:
        earlier = delivery.earlier
        sent = max((n for n, line in enumerate(earlier, 1) if line.get("code") is None), default=0)
        earlier = earlier[sent:]  # after it was delivered somebody asked for it again
        told = [line for line in earlier if "progress" in line]
        if told and len(targets := told[-1]["progress"]["targets"]) == size:
            self._known = list(targets)
        since = earlier[earlier.index(told[-1]) + 1 :] if told else earlier
        if any(line.get("code") == "LEASE_LOST" for line in since):  # it died while it was sending, or before
            lost = {"fate": Fate.UNKNOWN.value, "code": "LEASE_LOST"}
            self._known = [
                known if known is not None and known["fate"] in SETTLED else dict(lost) for known in self._known
            ]

    def tell(self, place: int, answer: Answer) -> None:
        """As in provider.Told."""
        said = {"fate": answer.fate.value, "id": answer.id, "code": answer.code, "remove": answer.remove or None}
        self._answers[place] = answer
        self._known[place] = {name: value for name, value in said.items() if value is not None}

    def result(self) -> dict[str, Any]:
        """JSON: how many of each fate, and the fate of each target in their order (null: never sent)."""
        found = {**self._counts(), "targets": self._known}
        return found if self._person is None else {**found, "devices": self._person.ids}

    def accepted(self) -> list[int]:
        """The places of those that this attempt reached."""
        return [place for place, answer in self._answers.items() if answer.fate is Fate.ACCEPTED]

    def dead(self) -> list[int]:
        """The places of those whose token is dead."""
        return [place for place, answer in self._answers.items() if answer.remove]

    def _settled(self, place: int) -> dict[str, Any] | None:
        known = self._known[place]
        return known if known is not None and known["fate"] in SETTLED else None

    def says(self) -> str:
        """The counts as a text: `498 accepted, 2 refused (UNREGISTERED)`."""
        parts = []
        for fate in Fate:
            codes = Counter(known.get("code") for known in self._of(fate))
            if codes:
                named = ", ".join(sorted(code for code in codes if code))
                parts.append(f"{codes.total()} {fate}" + (f" ({named})" if named else ""))
        unsent = self._known.count(None)
        return ", ".join([*parts, f"{unsent} not sent"] if unsent else parts)

    def outcome(self) -> Outcome:
        """Of the attempt. Raises Snooze where nothing is missing but quota."""
        counts, says = self._counts(), f"{self.says()}."
        again = [answer for answer in self._answers.values() if answer.fate is Fate.AGAIN]
        retries_unknown = bool(counts["unknown"]) and not self._leave
        if again:
            after = max((answer.after or 0.0 for answer in again), default=0.0)
            if all(answer.costs_nothing for answer in again) and not retries_unknown:
                raise Snooze(max(after, SHORTEST_SNOOZE))
            return Outcome.failed("PUSH_INCOMPLETE", says, retry_after=after or None)
        if retries_unknown:
            return Outcome.failed("PUSH_UNKNOWN", says)
        if counts["accepted"]:
            return Outcome.ok(self.result())
        if counts["unknown"]:
            return Outcome.failed("PUSH_UNKNOWN", says, retryable=False)
        return Outcome.failed("PUSH_REFUSED", says, retryable=False)

    def _of(self, fate: Fate) -> list[dict[str, Any]]:
        return [known for known in self._known if known is not None and known["fate"] == fate]

    def _counts(self) -> dict[str, int]:
        return {fate.value: len(self._of(fate)) for fate in Fate}


def _fields(options: Mapping[str, Any]) -> Fields | None:
    """Raises InvalidInput (TARGET_OPTIONS_INVALID)."""
    given = options.get("fields")
    if given is None:
        return None
    rename = given.get("rename", {}) if isinstance(given, dict) and not given.keys() - {"rename"} else None
    if not isinstance(rename, dict) or not all(isinstance(new, str) and new for new in rename.values()):
        raise _unfit('fields is {"rename": {"bible_code": "bibleCode"}}: all values are sent as strings.')
    if len(set(rename.values())) < len(rename):
        raise _unfit("fields.rename gives two fields one name.")
    return Fields(rename, strings=True)


def _has_places(document: Any) -> bool:
    if isinstance(document, str):
        return "{{" in document
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return any(map(_has_places, inner))


def _unfit(why: str) -> InvalidInput:
    return InvalidInput(why, code="TARGET_OPTIONS_INVALID", fix="See docs/guides/push.md.")
