"""Targets under a name: looked up just before each delivery, so that an edit reaches what is scheduled already."""

from __future__ import annotations

import asyncio
import logging
import traceback

from timebell.engine.node import Node
from timebell.errors import InvalidInput, Refused, StoreError, TimebellError
from timebell.model.target import Resolved, masked
from timebell.store.tenancy import targets
from timebell.store.tenancy.targets import Key
from timebell.targets.base import Delivery, Outcome, Target
from timebell.tenancy.secrets import keyring

log = logging.getLogger("timebell.targets")

Found = Resolved | TimebellError


class Names:
    """Looks up names, with all that are asked for meanwhile in one query."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._asked: dict[Key, asyncio.Future[Found]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def of(self, tenant_id: str, name: str) -> Found:
        """A target as it is now, or what is wrong."""
        waiting = self._asked.get((tenant_id, name))
        if waiting is None:
            waiting = self._asked[tenant_id, name] = asyncio.get_running_loop().create_future()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(waiting)

    async def _look(self) -> None:
        while self._asked:
            asked, self._asked = self._asked, {}
            found: dict[Key, Found] = {}
            wrong: TimebellError = StoreError("The target could not be looked up.")
            try:
                ring = keyring(self.node.secret_key)
                found = dict(await self.node.store.run(targets.resolve, ring, asked, self.node.clock.now()))
            except TimebellError as failed:
                wrong = failed
            except Exception:  # whoever waits must not wait for ever
                log.exception("targets cannot be looked up")
            for key, waiting in asked.items():
                if not waiting.done():
                    waiting.set_result(found.get(key, wrong))

    async def gone(self, tenant_id: str, used: Resolved, why: str) -> None:
        """The receiver is there no more: disable the target, unless it was edited meanwhile."""
        try:
            done = await self.node.store.run(
                targets.disable, tenant_id, used.name, used.revision, why, self.node.clock.now()
            )
        except StoreError:
            return  # the next delivery gets the same answer
        if done:
            log.warning(
                "target %s is disabled: %s Jobs for it fail until it is enabled", used.name, why,
                extra={"event": "target.disabled", "target": used.name, "tenant": tenant_id},
            )  # fmt: skip


def unusable(wrong: TimebellError) -> Outcome:
    """The outcome of an attempt whose target could not be looked up."""
    passes = isinstance(wrong, StoreError) or wrong.code in ("SECRET_KEY_MISSING", "SECRET_UNREADABLE")
    return Outcome.failed(wrong.code, str(wrong), retryable=passes)


async def deliver(target: Target, resolved: Resolved, delivery: Delivery, *, anyway: bool = False) -> Outcome:
    """Deliver to a target as it was looked up; its secrets are in nothing that comes back. One that is disabled gets
    nothing, unless `anyway`."""
    if resolved.disabled is not None and not anyway:
        why = f"The target {resolved.name!r} is disabled: {resolved.disabled}"
        return Outcome.failed(
            "TARGET_DISABLED", f"{why} Enable it (timebell target enable), then replay this job.", retryable=False
        )
    try:
        options = target.check(resolved.options)
    except (InvalidInput, Refused) as unfit:  # a secret was replaced, or the rules became stricter
        absent = unfit.code == "BROKER_NOT_CONFIGURED"  # on this node: others have that connection, or it will
        outcome = Outcome.failed(unfit.code, masked(str(unfit), resolved.secrets), retryable=absent)
        outcome.counts = not absent
        return outcome
    try:
        outcome = await target.deliver(delivery, options)
    except Exception as broken:  # a target's own fault is still an outcome, and its text may hold a secret
        told = masked("".join(traceback.format_exception(broken)), resolved.secrets)
        log.error("target %s broke on job %s\n%s", resolved.name, delivery.job_id, told)
        said = masked(f"{type(broken).__name__}: {broken}", resolved.secrets)
        return Outcome.failed("TARGET_BROKE", said[:500])
    outcome.result = masked(outcome.result, resolved.secrets)
    outcome.error = masked(outcome.error, resolved.secrets)
    outcome.record = masked(outcome.record, resolved.secrets)
    return outcome
