"""The verbs for targets under a name: make, change, test, rotate, enable, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from timebell.client.secrets import named as plain_name
from timebell.client.validation import text
from timebell.clock import Clock
from timebell.engine import named_targets
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.ids import new_id
from timebell.model import page
from timebell.model.page import Page
from timebell.model.payload import encode
from timebell.model.policy import seconds
from timebell.model.target import NamedTarget, filled, masked, secret_names
from timebell.store.dialects.base import Store
from timebell.store.jobs.bind_targets import no_such_target
from timebell.store.tenancy import secrets, targets
from timebell.targets.base import Delivery, Outcome, Target
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
OVERLAP = timedelta(days=1)
LONGEST_OVERLAP = 30 * 86_400.0
TEST_WITHIN = 30.0
TEST_TOPIC = "timebell.test"
SIGNED = ("http",)
"""The kinds of targets that sign what they send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """What a test delivery came to. `latency` is in seconds; in `sent`, and in what came back, secrets are masked."""

    target: NamedTarget
    delivered: bool
    latency: float
    code: str | None
    error: str | None
    response: Any
    sent: dict[str, Any] = field(default_factory=dict)


class Targets:
    """The verbs. `find` gives what delivers to a kind, `opened` makes sure that the store is open."""

    def __init__(
        self, store: Store, clock: Clock, opened: Callable[[], Any], ring: Callable[[], Keyring],
        find: Callable[[str], Target],
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._opened = opened
        self._ring = ring
        self._find = find

    async def put(
        self, name: str, kind: str, options: Mapping[str, Any], *, signing_secret: str | None = None,
        replace: bool = True, tenant_id: str = "default", created_by: str | None = None, connection: Any = None,
    ) -> NamedTarget:  # fmt: skip
        """Make a target, or change the options of the one that there is, unless `replace=False`.

        Any option may be `{"secret": "name"}`. A new one of kind `http` gets a signing secret, unless it brings one
        (`whsec_...`): it is in the answer's `signing_secret`, this once. Jobs and schedules that name the target
        are delivered as it is at that moment. Raises InvalidInput (TARGET_OPTIONS_INVALID, ...), Refused
        (SECRET_KEY_MISSING, PRIVATE_ADDRESS, ...), NotFound (SECRET_NOT_FOUND), Conflict (TARGET_EXISTS,
        TARGET_KIND_FIXED).
        """
        if not isinstance(options, Mapping) or "signingSecrets" in options:
            raise InvalidInput(
                f"options is {options!r:.60}.", code="TARGET_OPTIONS_INVALID", fix='E.g. {"url": "https://..."}.'
            )
        target, tenant_id = self._find(kind), text(tenant_id, "tenant_id")
        given = _signing_secret(kind, signing_secret)
        now = self._clock.now()
        wanted = NamedTarget(
            tenant_id=tenant_id, name=plain_name(name), kind=kind, options=dict(options), created_at=now,
            created_by=created_by, updated_at=now,
        )  # fmt: skip
        encode(wanted.options, "options")
        await self._opened()
        ring = self._ring()
        if connection is None:
            async with self._store.begin() as own:
                return await self._put(own, ring, target, wanted, given, replace)
        return await self._put(connection, ring, target, wanted, given, replace)

    async def _put(
        self, connection: Any, ring: Keyring, target: Target, wanted: NamedTarget, given: str | None, replace: bool
    ) -> NamedTarget:  # fmt: skip
        now, tenant_id = self._clock.now(), wanted.tenant_id
        names = secret_names(wanted.options)
        values = await self._store.join(connection, secrets.values, ring, tenant_id, names, kept=True)
        signing = given or (_new_signing_secret() if wanted.kind in SIGNED else None)
        _check(target, wanted.options, values, signing)
        known = await self._store.join(connection, targets.find, tenant_id, wanted.name, now)
        if known is None:
            given = signing
        return await self._store.join(connection, targets.put, ring, wanted, given, now, replace=replace)

    async def get(self, name: str, *, tenant_id: str = "default") -> NamedTarget:
        """One target. Raises NotFound (TARGET_NOT_FOUND)."""
        return await self._one(None, name, targets.find, tenant_id, name, self._clock.now())

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[NamedTarget]:  # fmt: skip
        """A page of targets by name. Raises InvalidInput."""
        page.check(limit, None)
        await self._opened()
        return await self._store.run(targets.page, tenant_id, limit, cursor, self._clock.now())

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> NamedTarget:
        """Forget a target. Raises NotFound, and Conflict (TARGET_IN_USE) while schedules or pending jobs name it."""
        return await self._one(connection, name, targets.remove, tenant_id, name, self._clock.now())

    async def enable(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> NamedTarget:
        """Deliver to it again, after it was disabled; jobs that failed meanwhile wait for a replay. Raises NotFound."""
        return await self._one(connection, name, targets.enable, tenant_id, name, self._clock.now())

    async def rotate_secret(
        self, name: str, *, signing_secret: str | None = None, overlap: float | timedelta = OVERLAP,
        tenant_id: str = "default", connection: Any = None,
    ) -> NamedTarget:  # fmt: skip
        """Give it a new signing secret, which is in the answer's `signing_secret`, this once. For `overlap` (seconds,
        or a timedelta) requests carry a signature by the old one too. Raises NotFound, InvalidInput, Conflict."""
        lasts = seconds(overlap, "overlap")
        if lasts > LONGEST_OVERLAP:
            raise InvalidInput("overlap is more than 30 days.", code="INVALID_OVERLAP", fix="Give at most 30 days.")
        given = _signing_secret("http", signing_secret) or _new_signing_secret()
        call = (targets.rotate, self._ring(), tenant_id, name, given, timedelta(seconds=lasts), self._clock.now())
        return await self._one(connection, name, *call)

    async def test(self, name: str, *, tenant_id: str = "default") -> Tested:
        """Send a signed test event (topic `timebell.test`), though the target be disabled, and say what it came to.

        Raises NotFound, Refused.
        """
        await self._opened()
        now = self._clock.now()
        key = (tenant_id, name)
        found = (await self._store.run(targets.resolve, self._ring(), [key], now))[key]
        if isinstance(found, TimebellError):
            raise found
        shown = await self.get(name, tenant_id=tenant_id)
        id_ = new_id(now)
        delivery = Delivery(
            job_id=id_, tenant_id=tenant_id, topic=TEST_TOPIC, payload={"test": True}, metadata={}, timezone="UTC",
            scheduled_at=now, fired_at=now, schedule_id=None, schedule_name=None, occurrence_key=id_, attempt=1,
            upcoming=[],
        )  # fmt: skip
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(TEST_WITHIN):
                outcome = await named_targets.deliver(self._find(found.kind), found, delivery, anyway=True)
        except TimeoutError:
            outcome = Outcome.failed("TIMEOUT", f"It took longer than {TEST_WITHIN:g} s.")
        took = self._clock.monotonic() - began
        return Tested(
            target=shown, delivered=outcome.delivered, latency=took, code=outcome.code, error=outcome.error,
            response=outcome.result, sent=_sent(outcome.sent, found.secrets),
        )  # fmt: skip

    async def _one(self, connection: Any, name: str, operation: Callable[..., R | None], *args: Any) -> R:
        await self._opened()
        if connection is None:
            found = await self._store.run(operation, *args)
        else:
            found = await self._store.join(connection, operation, *args)
        if found is None:
            raise no_such_target(name)
        return found


def _check(target: Target, options: Mapping[str, Any], values: Mapping[str, str], signing: str | None) -> None:
    """Check options with the secrets in them. Raises InvalidInput, Refused, which say none of these."""
    given = filled(options, values)
    try:
        target.check(given if signing is None else {**given, "signingSecrets": [signing]})
    except (InvalidInput, Refused) as unfit:
        unfit.message = masked(unfit.message, values.values())
        unfit.args = (unfit.message,)
        unfit.fix = masked(unfit.fix, values.values())
        raise unfit from None


def _signing_secret(kind: str, given: str | None) -> str | None:
    """A signing secret that somebody brings. Raises InvalidInput (SIGNING_SECRET_INVALID, TARGET_UNSIGNED)."""
    if given is None:
        return None
    if kind not in SIGNED:
        raise InvalidInput(f"A target of kind {kind} signs nothing.", code="TARGET_UNSIGNED")
    from timebell.targets.http import signers

    if not isinstance(given, str) or not signers([given]):
        raise InvalidInput(
            "The signing secret is empty.", code="SIGNING_SECRET_INVALID", fix="Leave it out for a new one."
        )
    return given


def _new_signing_secret() -> str:
    from timebell.targets.http import new_signing_secret

    return new_signing_secret()


def _sent(sent: Any, values: Any) -> dict[str, Any]:
    """What went out, for people: bytes as text, and no secret."""
    if not isinstance(sent, Mapping):
        return {}
    plain = {name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
             for name, value in sent.items()}  # fmt: skip
    shown: dict[str, Any] = masked(plain, values)
    return shown
