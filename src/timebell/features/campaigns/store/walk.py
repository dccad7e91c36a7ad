"""The walk of a campaign through its recipients, and its end.

Devices are read in the order of their ids, which do not change, so an interrupted walk resumes after its last id. If
send times depend on the zone, each zone has a walk of its own, and a device may move from a zone whose walk has not
started to one whose walk has passed. When all walks are done, `finish_walk` therefore looks for recipients that no
walk has met, in every zone, and adds walks for them, until there are none. Then it counts every other registered device
under the reason why it was excluded, so that the counts add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, false, func, or_, select

from timebell.features.campaigns.model.campaign import ExclusionReason
from timebell.features.campaigns.model.campaign_plan import Campaign, ZoneProgress, next_zone, plan_zones
from timebell.features.campaigns.model.personalization import ATTRIBUTE_ROOT
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.filters import audience_conditions
from timebell.features.campaigns.store.tables import deliveries, devices
from timebell.model.payload import decode
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Recipient:
    """A recipient of a chunk: the id and token of a device.

    `values` are those of the placeholders in a personal message, {} otherwise. `variant` is the name of the variant of
    the message, if it has any.
    """

    id: str
    token: str
    user_id: str | None
    values: Mapping[str, Any]
    variant: str | None


_RECIPIENT_COLUMNS = (devices.c.token, devices.c.user_id)
_NO_VALUES: Mapping[str, Any] = {}
_VALUE_COLUMNS = ("platform", "gender", "age", "language", "timezone", "attributes")


def recipient_columns(campaign: Campaign) -> list[ColumnElement[Any]]:
    """Return the columns of devices that `recipients_from_rows` needs beside `id`."""
    more = [devices.c[name] for name in _VALUE_COLUMNS] if campaign.plan.is_personal else []
    return [*_RECIPIENT_COLUMNS, *more]


def recipients_from_rows(campaign: Campaign, rows: Iterable[Row[Any]]) -> list[Recipient]:
    """Return rows with an `id` and the recipient columns as recipients."""
    is_personal = campaign.plan.is_personal  # once, because it searches all texts of the message
    has_variants = bool(campaign.plan.experiment.variants)
    return [
        Recipient(
            row.id, row.token, row.user_id,
            placeholder_values(campaign.id, row) if is_personal and row.token is not None else _NO_VALUES,
            variant_of(campaign, row.id, row.user_id) if has_variants else None,
        )
        for row in rows
    ]  # fmt: skip


def variant_of(campaign: Campaign, device_id: str, user_id: str | None) -> str | None:
    """Return the name of the variant for a device; None if the message has no variants."""
    variant = campaign.plan.experiment.choose_variant(campaign.experiment_seed, user_id or device_id)
    return None if variant is None else variant.name


def placeholder_values(campaign_id: str, device: Any) -> dict[str, Any]:
    """Return the values of the placeholders for a device, or a row of one."""
    stored = device.attributes
    attributes = decode(stored) if isinstance(stored, str) else stored
    return {
        "campaignId": campaign_id, "deviceId": device.id, "userId": device.user_id,
        **{name: getattr(device, name) for name in _VALUE_COLUMNS if name != "attributes"},
        **{f"{ATTRIBUTE_ROOT}{name}": value for name, value in attributes.items()},
    }  # fmt: skip


def next_due_zone(tx: Transaction, campaign: Campaign, now: datetime) -> tuple[ZoneProgress | None, datetime]:
    """Return the next zone to send to, and when; (None, now) if all recipients were opened or excluded."""
    while True:
        progress, at = next_zone(campaign.zone_progress, campaign.plan, now)
        if progress is not None or campaign.all_opened or not _finish_walk(tx, campaign, now):
            return progress, at


def select_recipients(
    tx: Transaction, campaign: Campaign, progress: ZoneProgress, size: int
) -> tuple[list[Recipient], bool]:
    """Return the next recipients of a zone or of a retry in id order, and whether they are the last; move its cursor.

    The caller locks the campaign.
    """
    columns = select(devices.c.id, *recipient_columns(campaign))
    if progress.of == "ledger":
        query = columns.join(deliveries, deliveries.c.recipient == devices.c.id).where(
            deliveries.c.campaign_id == campaign.id, deliveries.c.state.in_(list(progress.states)),
            deliveries.c.chunk < progress.until, deliveries.c.recipient > progress.cursor,
            devices.c.id > progress.cursor,  # implied, but PostgreSQL would start to merge at the first device
        ).order_by(deliveries.c.recipient)  # fmt: skip
    else:
        matches = _recipient_conditions(tx, campaign)
        if progress.zone is not None:  # otherwise one walk passes each device once
            matches.append(_in_zone(campaign, progress.zone))
        query = columns.where(*matches, devices.c.id > progress.cursor).order_by(devices.c.id)
    recipients = recipients_from_rows(campaign, tx.execute(query.limit(size + 1)).all())
    is_last, recipients = len(recipients) <= size, recipients[:size]
    if recipients:
        progress.cursor = recipients[-1].id
    if recipients and progress.zone is not None:
        opened = _find_opened(tx, campaign, [recipient.id for recipient in recipients])
        recipients = [recipient for recipient in recipients if recipient.id not in opened]
    return recipients, is_last


def _find_opened(tx: Transaction, campaign: Campaign, ids: Sequence[str]) -> set[str]:
    """Return those of some devices, in id order, that are recipients of an opened chunk.

    A query of its own: as a condition of the walk, it would be evaluated for all deliveries of the campaign at each
    chunk. The range makes the primary key the best index even without statistics.
    """
    recipient = deliveries.c.recipient
    in_range = (deliveries.c.campaign_id == campaign.id) & (recipient >= ids[0]) & (recipient <= ids[-1])
    return set(tx.execute(select(recipient).where(in_range, recipient.in_(ids))).scalars())


def _recipient_conditions(tx: Transaction, campaign: Campaign) -> list[ColumnElement[bool]]:
    return audience_conditions(
        tx, campaign.tenant_id, campaign.filters, campaign.reference_time, campaign.id, campaign.cutoff
    )


def remaining_conditions(tx: Transaction, campaign: Campaign) -> list[ColumnElement[bool]]:
    """Return the conditions of devices that the campaign was not sent to yet."""
    conditions = _recipient_conditions(tx, campaign)
    if campaign.started_at is None:
        return conditions
    if campaign.plan.is_zone_dependent:
        return [*conditions, ~_is_opened(campaign)]
    cursors = [progress.cursor for progress in campaign.zone_progress if progress.of == "devices"
               and (progress.why is not None or not progress.done)]  # fmt: skip
    return [*conditions, devices.c.id > min(cursors) if cursors else false()]


def _is_opened(campaign: Campaign) -> ColumnElement[bool]:
    """Return the condition that a device is a recipient of an opened chunk."""
    opened = select(deliveries.c.recipient).where(
        deliveries.c.campaign_id == campaign.id, deliveries.c.recipient == devices.c.id
    )
    return opened.exists()


def _in_zone(campaign: Campaign, zone: str) -> ColumnElement[bool]:
    """Return the condition that a device is in a zone; devices without a zone are in that of the campaign."""
    in_zone = devices.c.timezone == zone
    return or_(in_zone, devices.c.timezone.is_(None)) if zone == campaign.timezone else in_zone


def _finish_walk(tx: Transaction, campaign: Campaign, now: datetime) -> bool:
    """Add walks for recipients that moved between zones and return True; or count the excluded devices."""
    counts = _count_unopened(tx, campaign)
    ended = _ended_zones(campaign)
    missed = {(zone or campaign.timezone) for reason, zone in counts if reason is None} - ended.keys()
    if campaign.plan.is_zone_dependent and missed:
        campaign.zone_progress += plan_zones(campaign.plan, now, campaign.timezone, sorted(missed))
        return True
    _store_exclusions(campaign, counts, ExclusionReason.FILTERS)  # matched only after their turn
    campaign.all_opened = True
    return False


def count_stopped(tx: Transaction, campaign: Campaign) -> None:
    """Count the devices that a stopped campaign was not sent to, by reason."""
    _store_exclusions(campaign, _count_unopened(tx, campaign), ExclusionReason.STOPPED)


def _count_unopened(tx: Transaction, campaign: Campaign) -> dict[tuple[ExclusionReason | None, str | None], int]:
    """Count the registered devices outside all opened chunks by reason and zone; see `count_by_reason`."""
    registered = devices.c.created_at <= campaign.cutoff
    return device_rows.count_by_reason(
        tx, campaign, registered, ~_is_opened(campaign), by_timezone=campaign.plan.is_zone_dependent
    )


def _ended_zones(campaign: Campaign) -> dict[str | None, ExclusionReason]:
    return {progress.zone: progress.why for progress in campaign.zone_progress if progress.why is not None}


def _store_exclusions(
    campaign: Campaign, counts: Mapping[tuple[ExclusionReason | None, str | None], int], otherwise: ExclusionReason
) -> None:  # fmt: skip
    """Replace the estimated exclusions by the exact ones, and account for devices deleted before their turn.

    `otherwise` is the reason of devices that match and whose zone has not ended.
    """
    ended = _ended_zones(campaign)
    no_token = campaign.excluded.get(ExclusionReason.NO_TOKEN.value, 0)
    held_out = campaign.excluded.get(ExclusionReason.HOLD_OUT.value, 0)  # exact: they have rows like recipients
    campaign.excluded = {}
    campaign.exclude(ExclusionReason.HOLD_OUT, held_out)
    for (reason, zone), count in counts.items():
        if reason is None:  # matches, but its zone ended before all were sent to
            reason = ended.get(zone or campaign.timezone, otherwise)
        campaign.exclude(reason, count)
    accounted = campaign.opened + sum(campaign.excluded.values())
    campaign.registered = max(campaign.registered or 0, accounted)
    campaign.exclude(ExclusionReason.REMOVED, campaign.registered - accounted)
    campaign.exclude(ExclusionReason.NO_TOKEN, no_token)
    left_out = (ExclusionReason.QUIET, ExclusionReason.EXPIRED, ExclusionReason.STOPPED)
    campaign.expected = campaign.opened + sum(campaign.excluded.get(reason.value, 0) for reason in left_out)


def count_registered(
    tx: Transaction, campaign: Campaign
) -> tuple[int, int, dict[str, int]]:  # fmt: skip
    """Return the numbers of devices registered at the start, of recipients, and of excluded devices by reason.

    An estimate during the walk. Recipients whose device was deleted since are included. They are counted first, so that
    a device that is deleted between the two queries is not counted in both.
    """
    device_exists = select(devices.c.id).where(devices.c.id == deliveries.c.recipient).exists()
    removed = tx.execute(
        select(func.count()).where(deliveries.c.campaign_id == campaign.id, ~device_exists)
    ).scalar_one()
    counts = device_rows.count_by_reason(tx, campaign, devices.c.created_at <= campaign.cutoff)
    excluded = {reason.value: count for (reason, _), count in counts.items() if reason is not None}
    expected = sum(count for (reason, _), count in counts.items() if reason is None) + removed
    return sum(excluded.values()) + expected, expected, excluded
