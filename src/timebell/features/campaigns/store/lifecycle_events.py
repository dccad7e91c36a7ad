"""Jobs that announce the start, pause, resumption and end of a campaign, in the transaction of the change (outbox)."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.ids import new_id
from timebell.model.job import NewJob
from timebell.model.payload import encode
from timebell.store.cluster import nodes
from timebell.store.jobs import claim
from timebell.store.jobs.bind_targets import bind_jobs, find_unbound
from timebell.store.transaction import Transaction

log = logging.getLogger("timebell.campaigns")

TOPIC_PREFIX = "timebell.campaign."


def announce_change(tx: Transaction, campaign: Campaign, now: datetime) -> None:
    """Insert the jobs that announce a new phase of a campaign: for its target `notify`, and for handlers."""
    event = _event_between(campaign.stored_phase, campaign.phase)
    if event is None:
        return
    topic = f"{TOPIC_PREFIX}{event}"
    jobs = []
    if any(node.routes.handles(topic) for node in nodes.list_nodes(tx)):
        jobs.append(_event_job(campaign, topic, now, None))
    if campaign.plan.notify is not None:
        job = _event_job(campaign, topic, now, campaign.plan.notify)
        if find_unbound(tx, [job]):
            log.warning("could not announce %s of campaign %s: no target %s", event, campaign.id, campaign.plan.notify)
        else:
            jobs.append(job)
    bind_jobs(tx, jobs)
    if jobs:
        claim.insert_jobs(tx, jobs)


def _event_between(before: str | None, after: str) -> str | None:
    """Return the event that leads from one phase to another, if there is one."""
    if before == after or after == "pending":
        return None
    return ("started" if before in (None, "pending") else "resumed") if after == "running" else after


def _event_job(campaign: Campaign, topic: str, now: datetime, target_name: str | None) -> NewJob:
    counts = campaign.counts()
    payload: dict[str, Any] = {
        "campaignId": campaign.id, "name": campaign.name, "state": campaign.state.value, "reason": campaign.reason,
        "scheduleId": campaign.schedule_id, "expected": campaign.expected,
        "counts": {"pending": counts.pending, "accepted": counts.accepted, "refused": counts.refused,
                   "unknown": counts.unknown, "unsent": counts.skipped},
    }  # fmt: skip
    return NewJob(
        id=new_id(now), tenant_id=campaign.tenant_id, topic=topic, scheduled_at=now, run_at=now,
        timezone=campaign.timezone, created_at=now, payload=encode(payload), route=topic, target_name=target_name,
    )  # fmt: skip
