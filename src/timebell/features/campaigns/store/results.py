"""Results of a campaign by variant, with the opens that apps report."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, update

from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.store import devices
from timebell.features.campaigns.store.tables import deliveries
from timebell.store.transaction import Transaction


@dataclass(slots=True)
class VariantResult:
    """Numbers of recipients of a variant; `variant` None: without one. `held` got no message, for comparison."""

    variant: str | None
    sending: int = 0
    accepted: int = 0
    refused: int = 0
    unknown: int = 0
    unsent: int = 0
    held: int = 0
    opened: int = 0

    @property
    def open_rate(self) -> float | None:
        """The share of the accepted messages that were opened; None if none was accepted."""
        return self.opened / self.accepted if self.accepted else None


def count_results(tx: Transaction, campaign: Campaign) -> list[VariantResult]:
    """Return the results of each variant in the order of the campaign; recipients without one come last."""
    t = deliveries.c
    query = select(t.variant, t.state, func.count().label("many"), func.count(t.opened_at).label("opened"))
    by_name: dict[str | None, VariantResult] = {}
    for variant in campaign.plan.experiment.variants:
        by_name[variant.name] = VariantResult(variant.name)
    for row in tx.execute(query.where(t.campaign_id == campaign.id).group_by(t.variant, t.state)):
        result = by_name.setdefault(row.variant, VariantResult(row.variant))
        setattr(result, row.state, getattr(result, row.state) + row.many)
        result.opened += row.opened
    return sorted(by_name.values(), key=lambda result: result.variant is None)


def record_open(tx: Transaction, campaign: Campaign, token: str, now: datetime) -> bool:
    """Record the first time that a device opened the message; return whether it is a recipient."""
    device = devices.find_by_token(tx, campaign.tenant_id, token)
    if device is None:
        return False
    t = deliveries.c
    of_device = (t.campaign_id == campaign.id) & (t.recipient == device.id) & (t.sends > 0)
    if tx.execute(update(deliveries).where(of_device, t.opened_at.is_(None)).values(opened_at=now)).rowcount:
        return True
    return tx.execute(select(t.recipient).where(of_device)).first() is not None
