"""Named targets, resolved just before each delivery, so that an edit also applies to scheduled jobs."""

from __future__ import annotations

import asyncio
import logging
import traceback

from timebell.engine.node import Node
from timebell.errors import InvalidInput, Refused, StoreError, TimebellError
from timebell.model.target import ResolvedTarget, mask_secrets
from timebell.store.tenancy import targets
from timebell.store.tenancy.targets import TargetKey
from timebell.targets.base import Delivery, Outcome, Target
from timebell.tenancy.secrets import keyring

log = logging.getLogger("timebell.targets")

ResolvedOrError = ResolvedTarget | TimebellError


class TargetResolver:
    """Resolves target names; concurrent requests share one query."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._pending: dict[TargetKey, asyncio.Future[ResolvedOrError]] = {}
        self._resolving: asyncio.Task[None] | None = None

    async def resolve(self, tenant_id: str, name: str) -> ResolvedOrError:
        """Return the current target, or the error that prevents its use."""
        future = self._pending.get((tenant_id, name))
        if future is None:
            future = self._pending[tenant_id, name] = asyncio.get_running_loop().create_future()
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.create_task(self._resolve_pending())
        return await asyncio.shield(future)

    async def _resolve_pending(self) -> None:
        while self._pending:
            pending, self._pending = self._pending, {}
            resolved: dict[TargetKey, ResolvedOrError] = {}
            error: TimebellError = StoreError("The target could not be resolved.")
            try:
                ring = keyring(self.node.secret_key)
                resolved = dict(
                    await self.node.store.run(targets.resolve_targets, ring, pending, self.node.clock.now())
                )
            except TimebellError as exc:
                error = exc
            except Exception:  # the callers must not wait forever
                log.exception("could not resolve targets")
            for key, future in pending.items():
                if not future.done():
                    future.set_result(resolved.get(key, error))

    async def disable_target(self, tenant_id: str, target: ResolvedTarget, reason: str) -> None:
        """Disable a target whose receiver is gone, unless it was edited meanwhile."""
        try:
            disabled = await self.node.store.run(
                targets.disable_target, tenant_id, target.name, target.revision, reason, self.node.clock.now()
            )
        except StoreError:
            return  # the next delivery will try again
        if disabled:
            log.warning(
                "disabled target %s: %s Its jobs fail until it is enabled", target.name, reason,
                extra={"event": "target.disabled", "target": target.name, "tenant": tenant_id},
            )  # fmt: skip


def lookup_failed(error: TimebellError) -> Outcome:
    """Return the outcome of an attempt whose target could not be resolved."""
    is_transient = isinstance(error, StoreError) or error.code in ("SECRET_KEY_MISSING", "SECRET_UNREADABLE")
    return Outcome.failed(error.code, str(error), retryable=is_transient)


async def deliver(
    target: Target, resolved: ResolvedTarget, delivery: Delivery, *, ignore_disabled: bool = False
) -> Outcome:
    """Deliver to a resolved target, and mask its secrets in the outcome.

    A disabled target is not contacted, unless `ignore_disabled`.
    """
    if resolved.disabled_reason is not None and not ignore_disabled:
        reason = f"Target {resolved.name!r} is disabled: {resolved.disabled_reason}"
        return Outcome.failed(
            "TARGET_DISABLED", f"{reason} Enable it (timebell target enable), then retry this job.", retryable=False
        )
    try:
        options = target.check(resolved.options)
    except (InvalidInput, Refused) as error:  # a secret was replaced, or the rules became stricter
        is_unconfigured = error.code == "BROKER_NOT_CONFIGURED"  # on this node; others may have the connection
        outcome = Outcome.failed(error.code, mask_secrets(str(error), resolved.secrets))
        outcome.retryable = is_unconfigured or isinstance(error, Refused)  # the settings of another node may allow it
        outcome.uses_attempt = not is_unconfigured
        return outcome
    try:
        outcome = await target.deliver(delivery, options)
    except Exception as exc:  # report a bug in a target as an outcome; its text may contain a secret
        trace = mask_secrets("".join(traceback.format_exception(exc)), resolved.secrets)
        log.error("target %s crashed on job %s\n%s", resolved.name, delivery.job_id, trace)
        message = mask_secrets(f"{type(exc).__name__}: {exc}", resolved.secrets)
        return Outcome.failed("TARGET_ERROR", message[:500])
    outcome.result = mask_secrets(outcome.result, resolved.secrets)
    outcome.error = mask_secrets(outcome.error, resolved.secrets)
    outcome.record = mask_secrets(outcome.record, resolved.secrets)
    return outcome
