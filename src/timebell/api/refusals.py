"""Audit records of refused requests and failed sign-ins, limited so that an attacker cannot fill the table.

Refusals of one client for the same reason have one record a minute, which counts the others. Each tenant, and all
clients that are not authenticated, have at most MAX_RECORDS_PER_MINUTE records a minute and process.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from timebell.app import Timebell
from timebell.errors import StoreError
from timebell.ids import new_id
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import REFUSED, AuditRecord

log = logging.getLogger("timebell.api")

RECORD_INTERVAL_SECONDS = 60.0  # between two records of the same client and reason
MAX_RECORDS_PER_MINUTE = 60
MAX_ENTRIES = 10_000
UNKNOWN_ACTOR = "unknown"


class RefusalLog:
    """Write audit records of refusals in transactions of their own, as those of the requests were rolled back."""

    def __init__(self, app: Timebell) -> None:
        self._app = app
        self._recorded: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        """When a refusal was recorded last (monotonic time), and how many were suppressed since."""
        self._budgets: dict[str, tuple[float, int]] = {}
        """The begin of the current minute and the number of records in it, by owner."""

    async def record(
        self, *, tenant_id: str, actor: str, actor_kind: str, network: str, action: str, code: str,
        address: str | None = None, subject: str | None = None, key_id: str | None = None,
        request_id: str | None = None, authenticated: bool = True,
    ) -> None:  # fmt: skip
        """Record a refusal, unless its limits are reached. `network` is that of the client's address."""
        at, now = self._app.clock.monotonic(), self._app.clock.now()
        entry = (tenant_id, actor, network, action, code)
        recorded_at, suppressed = self._recorded.get(entry, (None, 0))
        is_recent = recorded_at is not None and at - recorded_at < RECORD_INTERVAL_SECONDS
        if is_recent or not self._take(tenant_id if authenticated else "", at):
            self._remember(entry, at if recorded_at is None else recorded_at, suppressed + 1)
            return
        self._remember(entry, at, 0)
        record = AuditRecord(
            id=new_id(now), tenant_id=tenant_id, at=now, actor=actor, actor_kind=actor_kind, action=action,
            subject=None if subject is None else subject[:200], outcome=REFUSED, code=code, suppressed=suppressed,
            key_id=key_id, address=address, request_id=request_id,
        )  # fmt: skip
        try:
            await self._app.store.run(audit_log.write_record, record)
        except StoreError as error:  # the refusal itself must reach the client
            log.warning("could not record refusal action=%s code=%s error=%s", action, code, error)

    def _take(self, owner: str, at: float) -> bool:
        begin, count = self._budgets.get(owner, (at, 0))
        if at - begin >= RECORD_INTERVAL_SECONDS:
            begin, count = at, 0
        if len(self._budgets) > MAX_ENTRIES:
            self._budgets.clear()
        self._budgets[owner] = begin, count + 1
        return count < MAX_RECORDS_PER_MINUTE

    def _remember(self, entry: tuple[str, ...], at: float, suppressed: int) -> None:
        self._recorded[entry] = at, suppressed
        self._recorded.move_to_end(entry)
        if len(self._recorded) > MAX_ENTRIES:
            self._recorded.popitem(last=False)
