"""Client operations on named targets: create, change, test, rotate, enable, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from timebell.client.secrets import check_name
from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.durations import Duration
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.feature import Feature
from timebell.ids import new_id
from timebell.model import page
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.model.policy import parse_seconds
from timebell.model.target import (
    NamedTarget,
    fill_secrets,
    mask_secrets,
    require_secret_references,
    secret_names,
)
from timebell.store.dialects.base import Store
from timebell.store.jobs.bind_targets import target_not_found
from timebell.store.tenancy import secrets, targets
from timebell.targets.base import Delivery, Outcome, Target
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
DEFAULT_OVERLAP = timedelta(days=1)
MAX_OVERLAP_SECONDS = 30 * 86_400.0
TEST_TIMEOUT_SECONDS = 30.0
TEST_TOPIC = "timebell.test"
MAX_SHOWN_BODY_CHARACTERS = 16 * 1024
SIGNING_KINDS = ("http",)
"""Kinds of targets that sign their requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTestResult:
    """Result of a test delivery. `latency` is in seconds; secrets in `request` are masked."""

    target: NamedTarget
    delivered: bool
    latency: float
    code: str | None
    error: str | None
    response: Any
    request: dict[str, Any] = field(default_factory=dict)


class Targets:
    """Target operations.

    `ensure_open` opens the store if needed, `get_keyring` provides the keys for secrets, `find_kind` returns the target
    implementation of a kind. `features` have objects that may use targets.
    """

    def __init__(
        self, store: Store, clock: Clock, ensure_open: Callable[[], Any], get_keyring: Callable[[], Keyring],
        find_kind: Callable[[str], Target], features: Sequence[Feature],
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._get_keyring = get_keyring
        self._find_kind = find_kind
        self._features = features

    async def put(
        self, name: str, kind: str, options: Mapping[str, Any], *, signing_secret: str | None = None,
        replace: bool = True, tenant_id: str = "default", created_by: str | None = None, connection: Any = None,
    ) -> NamedTarget:  # fmt: skip
        """Create a target, or change the options of an existing one, unless `replace=False`.

        Any option may be `{"secret": "name"}`. A new target of kind `http` gets a signing secret (`whsec_...`), by
        default a generated one, which only this call returns, in `signing_secret`. Jobs and schedules that refer to
        the target use its options at the time of delivery.

        Raises InvalidInput (INVALID_TARGET_OPTIONS, ...), Refused (SECRET_KEY_MISSING, PRIVATE_ADDRESS, ...), NotFound
        (SECRET_NOT_FOUND), Conflict (TARGET_EXISTS, TARGET_KIND_FIXED).
        """
        if not isinstance(options, Mapping) or "signingSecrets" in options:
            raise InvalidInput(
                f"options is {options!r:.60}.",
                code="INVALID_TARGET_OPTIONS",
                fix='Use a mapping such as {"url": "https://..."}.',
            )
        target, tenant_id = self._find_kind(kind), check_text(tenant_id, "tenant_id")
        if kind == "http":
            require_secret_references(options)
        checked_secret = _check_signing_secret(kind, signing_secret)
        now = self._clock.now()
        requested = NamedTarget(
            tenant_id=tenant_id, name=check_name(name), kind=kind, options=dict(options), created_at=now,
            created_by=created_by, updated_at=now,
        )  # fmt: skip
        encode(requested.options, "options")
        await self._ensure_open()
        keyring = self._get_keyring()
        if connection is None:
            async with self._store.begin() as own:
                return await self._put(own, keyring, target, requested, checked_secret, replace)
        return await self._put(connection, keyring, target, requested, checked_secret, replace)

    async def _put(
        self, connection: Any, keyring: Keyring, target: Target, requested: NamedTarget, signing_secret: str | None,
        replace: bool,
    ) -> NamedTarget:  # fmt: skip
        now, tenant_id = self._clock.now(), requested.tenant_id
        names = secret_names(requested.options)
        values = await self._store.join(connection, secrets.decrypt_values, keyring, tenant_id, names, lock=True)
        initial_secret = signing_secret or (_new_signing_secret() if requested.kind in SIGNING_KINDS else None)
        _check_options(target, requested.options, values, initial_secret)
        existing = await self._store.join(connection, targets.find_target, tenant_id, requested.name, now)
        if existing is None:
            signing_secret = initial_secret
        return await self._store.join(
            connection, targets.upsert_target, keyring, requested, signing_secret, now, replace=replace
        )

    async def get(self, name: str, *, tenant_id: str = "default") -> NamedTarget:
        """Return a target. Raises NotFound (TARGET_NOT_FOUND)."""
        return await self._run_on_target(None, name, targets.find_target, tenant_id, name, self._clock.now())

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[NamedTarget]:  # fmt: skip
        """Return a page of targets in name order. Raises InvalidInput."""
        page.validate_paging(limit, None)
        await self._ensure_open()
        return await self._store.run(targets.list_targets, tenant_id, limit, cursor, self._clock.now())

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> NamedTarget:
        """Delete a target. Raises NotFound, and Conflict (TARGET_IN_USE) while schedules, triggers or jobs use it."""
        delete_args = (tenant_id, name, self._clock.now(), self._features)
        return await self._run_on_target(connection, name, targets.delete_target, *delete_args)

    async def enable(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> NamedTarget:
        """Enable a disabled target; jobs that failed meanwhile have to be retried manually. Raises NotFound."""
        return await self._run_on_target(connection, name, targets.enable_target, tenant_id, name, self._clock.now())

    async def rotate_secret(
        self, name: str, *, signing_secret: str | None = None, overlap: Duration = DEFAULT_OVERLAP,
        tenant_id: str = "default", connection: Any = None,
    ) -> NamedTarget:  # fmt: skip
        """Replace the signing secret; only this call returns the new one, in `signing_secret`.

        For `overlap` (numbers are seconds), requests are also signed with the old secret. Raises NotFound,
        InvalidInput, Conflict.
        """
        overlap_seconds = parse_seconds(overlap, "overlap")
        if overlap_seconds > MAX_OVERLAP_SECONDS:
            raise InvalidInput("overlap is more than 30 days.", code="INVALID_OVERLAP", fix="Use at most 30 days.")
        new_secret = _check_signing_secret("http", signing_secret) or _new_signing_secret()
        call = (
            targets.rotate_signing_secret,
            self._get_keyring(),
            tenant_id,
            name,
            new_secret,
            timedelta(seconds=overlap_seconds),
            self._clock.now(),
        )
        return await self._run_on_target(connection, name, *call)

    async def test(self, name: str, *, payload: Any = None, tenant_id: str = "default") -> TargetTestResult:
        """Send a signed test event (topic `timebell.test`), even to a disabled target, and return the result.

        `payload` is that of the event, by default `{"test": true}`. Raises NotFound, InvalidPayload, Refused.
        """
        payload = {"test": True} if payload is None else decode(encode(payload))
        await self._ensure_open()
        now = self._clock.now()
        key = (tenant_id, name)
        resolved = (await self._store.run(targets.resolve_targets, self._get_keyring(), [key], now))[key]
        if isinstance(resolved, TimebellError):
            raise resolved
        target = await self.get(name, tenant_id=tenant_id)
        id_ = new_id(now)
        delivery = Delivery(
            job_id=id_, tenant_id=tenant_id, topic=TEST_TOPIC, payload=payload, metadata={}, timezone="UTC",
            scheduled_at=now, fired_at=now, schedule_id=None, schedule_name=None, occurrence_key=id_, attempt=1,
            upcoming=[],
        )  # fmt: skip
        from timebell.engine import named_targets

        started = self._clock.monotonic()
        try:
            async with asyncio.timeout(TEST_TIMEOUT_SECONDS):
                outcome = await named_targets.deliver(
                    self._find_kind(resolved.kind), resolved, delivery, ignore_disabled=True
                )
        except TimeoutError:
            outcome = Outcome.failed("TIMEOUT", f"The delivery took longer than {TEST_TIMEOUT_SECONDS:g} s.")
        latency = self._clock.monotonic() - started
        return TargetTestResult(
            target=target, delivered=outcome.delivered, latency=latency, code=outcome.code, error=outcome.error,
            response=_shorten_body(mask_secrets(outcome.received_response or outcome.result, resolved.secrets)),
            request=_shorten_body(_mask_request(outcome.sent_request, resolved.secrets)),
        )  # fmt: skip

    async def _run_on_target(self, connection: Any, name: str, operation: Callable[..., R | None], *args: Any) -> R:
        await self._ensure_open()
        if connection is None:
            result = await self._store.run(operation, *args)
        else:
            result = await self._store.join(connection, operation, *args)
        if result is None:
            raise target_not_found(name)
        return result


def _check_options(target: Target, options: Mapping[str, Any], values: Mapping[str, str], signing: str | None) -> None:
    """Check options with the values of their secrets. Raises InvalidInput, Refused, with masked values."""
    filled = fill_secrets(options, values)
    try:
        target.check(filled if signing is None else {**filled, "signingSecrets": [signing]})
    except (InvalidInput, Refused) as error:
        error.message = mask_secrets(error.message, values.values())
        error.args = (error.message,)
        error.fix = mask_secrets(error.fix, values.values())
        raise error from None


def _check_signing_secret(kind: str, secret: str | None) -> str | None:
    """Return a valid signing secret of the caller. Raises InvalidInput (INVALID_SIGNING_SECRET, TARGET_UNSIGNED)."""
    if secret is None:
        return None
    if kind not in SIGNING_KINDS:
        raise InvalidInput(
            f"A target of kind {kind} has no signing secret.", code="TARGET_UNSIGNED",
            fix="Only HTTP targets sign their requests.",
        )  # fmt: skip
    from timebell.targets.webhook_signatures import signing_keys

    if not isinstance(secret, str) or not signing_keys([secret]):
        raise InvalidInput(
            "The signing secret is empty.", code="INVALID_SIGNING_SECRET", fix="Omit it to generate a new one."
        )
    return secret


def _new_signing_secret() -> str:
    from timebell.targets.webhook_signatures import new_signing_secret

    return new_signing_secret()


def _shorten_body(exchange: Any) -> Any:
    """Return a request or response with at most MAX_SHOWN_BODY_CHARACTERS of its body."""
    body = exchange.get("body") if isinstance(exchange, dict) else None
    if not isinstance(body, str) or len(body) <= MAX_SHOWN_BODY_CHARACTERS:
        return exchange
    omitted = len(body) - MAX_SHOWN_BODY_CHARACTERS
    return {**exchange, "body": f"{body[:MAX_SHOWN_BODY_CHARACTERS]}... ({omitted:,} more characters)"}


def _mask_request(request: Any, values: Any) -> dict[str, Any]:
    """Return a sent request for display: bytes as text, secrets masked."""
    if not isinstance(request, Mapping):
        return {}
    plain = {name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
             for name, value in request.items()}  # fmt: skip
    masked: dict[str, Any] = mask_secrets(plain, values)
    return masked
