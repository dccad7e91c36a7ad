"""The budget of calls to the API of an account, which all nodes and all sources of the account share."""

from __future__ import annotations

from datetime import timedelta

from timebell.engine.node import Node
from timebell.errors import SourceFailed
from timebell.features.triggers.model.trigger import Source
from timebell.features.triggers.sources.call_plan import CallPlan, account_id
from timebell.features.triggers.store import call_budgets


class AccountBudget:
    """Budget of the account of one source."""

    def __init__(self, node: Node, source: Source) -> None:
        self.node = node
        self._tenant_id = source.tenant_id
        self._account = account_id(source.tenant_id, source.options)
        self._limit = CallPlan.parse(source.options).daily_calls

    async def take(self) -> None:
        """Count a call. Raises SourceFailed (SOURCE_BUDGET_SPENT), StoreError."""
        now, store = self.node.clock.now(), self.node.store
        retry_at = await store.run(call_budgets.take_call, self._account, self._tenant_id, self._limit, now)
        if retry_at is not None:
            raise SourceFailed(
                f"No calls before {retry_at:%Y-%m-%d %H:%M:%S} UTC: the account's budget is used up.",
                code="SOURCE_BUDGET_SPENT", retry_after=max(0.0, (retry_at - now).total_seconds()),
                fix="Set dailyCalls to the daily limit of the account, or read less often.",
            )  # fmt: skip

    async def postpone(self, seconds: float | None) -> None:
        """Keep all nodes from calling the API for some time, by default until the daily limits are reset."""
        now = self.node.clock.now()
        until = call_budgets.next_midnight(now) if seconds is None else now + timedelta(seconds=seconds)
        await self.node.store.run(call_budgets.postpone_calls, self._account, until)
