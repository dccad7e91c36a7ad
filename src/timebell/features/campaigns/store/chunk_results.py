"""Results of chunks: stored for each batch of messages, and when a chunk is closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Table, bindparam, func, select, update

from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.store import campaign_jobs
from timebell.features.campaigns.store import campaigns as rows
from timebell.features.campaigns.store import devices as device_rows
from timebell.features.campaigns.store.campaigns import BLOCKED, ERRORS, UNKNOWN, UNSENT
from timebell.features.campaigns.store.tables import campaigns, chunks, deliveries
from timebell.features.campaigns.store.walk import Recipient
from timebell.store.transaction import Transaction

MAX_RETRY_TIME = timedelta(hours=6)
"""How long messages that the provider rejects temporarily are retried, unless they expire sooner."""
SENDING, WAITING, DONE = "sending", "waiting", "done"
_RESULT_COLUMNS = ("campaign_id", "recipient", "chunk", "state", "code", "message_id", "sends", "unknown_sends")
_RESULT_STATES = ("accepted", "refused", "unknown")


def _increments(counted: Table) -> dict[str, Any]:
    return {state: counted.c[state] + bindparam(f"added_{state}") for state in _RESULT_STATES}


# Built once: to build them for each batch would take longer than to execute them.
_ADD_TO_CAMPAIGN = update(campaigns).where(campaigns.c.id == bindparam("campaign")).values(_increments(campaigns))
_ANNOUNCE_BATCH = (
    update(chunks)
    .where(chunks.c.campaign_id == bindparam("campaign"), chunks.c.number == bindparam("chunk"))
    .where(chunks.c.attempt == bindparam("tried"), chunks.c.state == SENDING)
    .values(posted_to=bindparam("last"), **_increments(chunks))
)


class ChunkTakenOver(Exception):
    """Another attempt of the chunk's job has started: the attempt number is the fence."""


@dataclass(frozen=True, slots=True)
class DeliveryResult:
    """Result of one recipient; `state` is accepted, refused or unknown, or sending if it is to be sent to again.

    `is_uncertain`: the message may have arrived nevertheless. `was_posted` is false if it never left this node.
    `token_is_dead`: the device is removed.
    """

    recipient: Recipient
    state: str
    code: str | None = None
    message_id: str | None = None
    is_uncertain: bool = False
    was_posted: bool = True
    token_is_dead: bool = False


@dataclass(slots=True)
class ChunkSummary:
    """The results of one attempt at a chunk.

    `codes` of all errors; `finished` recipients, `failed` ones among them as `Health` defines it. `blocked`: the reason
    why the provider refuses all messages of the account. `uses_attempt`: the messages that are not sent were rejected,
    and did not only wait for the quota.
    """

    codes: list[str] = field(default_factory=list)
    finished: int = 0
    failed: int = 0
    blocked: str | None = None
    uses_attempt: bool = True


def record_posted(
    tx: Transaction, campaign_id: str, number: int, attempt: int, results: Sequence[DeliveryResult], posted_to: str, *,
    tenant_id: str,
) -> None:  # fmt: skip
    """Store the results of a batch, and announce the next one, up to the recipient `posted_to`.

    Raises ChunkTakenOver, and writes nothing. Locks the campaign before the chunk, like all other functions.
    """
    counts = Counter(result.state for result in results)
    added = {f"added_{state}": counts[state] for state in _RESULT_STATES}
    key = {"campaign": campaign_id, "chunk": number, "tried": attempt, "last": posted_to}
    tx.execute(_ADD_TO_CAMPAIGN, {"campaign": campaign_id, **added})
    if not tx.execute(_ANNOUNCE_BATCH, {**key, **added}).rowcount:
        raise ChunkTakenOver
    store_results(tx, tenant_id, campaign_id, number, results)


def close_chunk(
    tx: Transaction, campaign_id: str, number: int, attempt: int, results: Sequence[DeliveryResult], unsent: int,
    now: datetime, *, summary: ChunkSummary | None = None,
) -> bool | None:  # fmt: skip
    """Store the results of a chunk's last batch, and what `summary` says about the whole chunk.

    `unsent` messages were not accepted for now. Returns True if they should be tried again. Returns None, and writes
    nothing, if another attempt has taken over the chunk: the attempt number is the fence.
    """
    summary = summary or ChunkSummary()
    campaign = rows.find_campaign(tx, None, campaign_id, lock=True)
    chunk = tx.execute(select(chunks).where(matches_number(campaign_id, number))).first()
    if campaign is None or chunk is None or chunk.attempt != attempt:
        return None
    if chunk.state != SENDING:  # the call is repeated because the outcome of the first commit was unknown
        return bool(chunk.state == WAITING)
    counts = store_results(tx, campaign.tenant_id, campaign_id, number, results)
    add_to_chunk(tx, campaign_id, number, counts)
    count_results(campaign, counts)
    campaign.health.add(summary.codes, summary.finished, summary.failed)
    _pause_on_errors(campaign, summary.blocked)
    in_time = now < _retry_deadline(campaign, chunk.started_at)
    try_again = bool(unsent) and in_time and campaign.state is CampaignState.RUNNING
    if try_again:
        tx.execute(update(chunks).where(matches_number(campaign_id, number)).values(
            state=WAITING, attempts_used=chunk.attempts_used + summary.uses_attempt, posted_to=""
        ))  # fmt: skip
        campaign.possible_duplicates += sum(result.is_uncertain for result in results if result.state == SENDING)
    else:
        if unsent:
            _give_up(tx, campaign, number)
        finish_chunk(tx, campaign, number, now)
    if campaign.state is CampaignState.RUNNING:
        campaign.reason = f"retrying: {campaign.health.describe_codes()}" if try_again else None
    rows.save_campaign(tx, campaign, now)
    return try_again


def _pause_on_errors(campaign: Campaign, blocked: str | None) -> None:
    """Pause a running campaign if the provider refuses the account, or too many of its recent messages."""
    if campaign.state is not CampaignState.RUNNING:
        return
    if blocked is not None:
        campaign.state, campaign.reason = CampaignState.PAUSED, f"{BLOCKED}: {blocked}"
    elif campaign.health.exceeds(campaign.plan.max_error_rate):
        campaign.state, campaign.reason = CampaignState.PAUSED, f"{ERRORS}: {campaign.health.describe_sample()}"


def _retry_deadline(campaign: Campaign, started_at: datetime) -> datetime:
    """Return until when a chunk is retried: while its message is of use."""
    plan = campaign.plan
    deadline = started_at + (MAX_RETRY_TIME if plan.ttl is None else min(MAX_RETRY_TIME, timedelta(seconds=plan.ttl)))
    return deadline if plan.expires_at is None else min(deadline, plan.expires_at)


def _give_up(tx: Transaction, campaign: Campaign, number: int) -> None:
    """Record the open recipients of a chunk as unsent, or as unknown if a message may have arrived."""
    is_open = (deliveries.c.campaign_id == campaign.id) & (deliveries.c.chunk == number)
    is_open &= deliveries.c.state == SENDING
    for state, matches in ((UNKNOWN, deliveries.c.unknown_sends > 0), (UNSENT, deliveries.c.unknown_sends == 0)):
        code = func.coalesce(deliveries.c.code, "NOT_SENT")
        count = tx.execute(update(deliveries).where(is_open, matches).values(state=state, code=code)).rowcount
        counts = {state: count} if count else {}
        add_to_chunk(tx, campaign.id, number, counts)
        count_results(campaign, counts)


def store_results(
    tx: Transaction, tenant_id: str, campaign_id: str, number: int, results: Sequence[DeliveryResult]
) -> dict[str, int]:  # fmt: skip
    """Store the results of recipients of a chunk, and return the number of final ones by state.

    Removes devices whose token is dead. An upsert, because every database executes it for all rows at once; the rows
    exist.
    """
    if not results:
        return {}
    tx.bulk_upsert(deliveries, _RESULT_COLUMNS, [
        (campaign_id, result.recipient.id, number, result.state, result.code, result.message_id,
         int(result.was_posted), int(result.is_uncertain))
        for result in results
    ], replace=("state", "code", "message_id"), add=("sends", "unknown_sends"))  # fmt: skip
    dead = [(result.recipient.id, result.recipient.token) for result in results if result.token_is_dead]
    device_rows.delete_dead(tx, tenant_id, dead)
    return Counter(result.state for result in results if result.state != SENDING)


def count_results(campaign: Campaign, counts: dict[str, int]) -> None:
    """Add numbers of results by state to the counters of a campaign. The caller saves it."""
    for state, count in counts.items():
        setattr(campaign, state, getattr(campaign, state) + count)


def add_to_chunk(tx: Transaction, campaign_id: str, number: int, counts: dict[str, int]) -> None:
    """Add numbers of results by state to the counters of a chunk."""
    if counts:
        values = {state: chunks.c[state] + count for state, count in counts.items()}
        tx.execute(update(chunks).where(matches_number(campaign_id, number)).values(**values))


def finish_chunk(tx: Transaction, campaign: Campaign, number: int, now: datetime) -> None:
    """Finish a chunk, and with the last one the campaign."""
    tx.execute(update(chunks).where(matches_number(campaign.id, number)).values(state=DONE, ended_at=now))
    campaign.open_chunks -= 1
    if campaign.state is CampaignState.RUNNING and (campaign.job_id is None or campaign.all_chunks_opened):
        campaign_jobs.enqueue_next_or_complete(tx, campaign, now)
    elif campaign.state is CampaignState.STOPPED:
        campaign.ended_at = now
        if not campaign.open_chunks:
            campaign_jobs.enqueue_recipient_count(tx, campaign, now)


def matches_number(campaign_id: str, number: int) -> Any:
    """Return the condition that selects a chunk."""
    return (chunks.c.campaign_id == campaign_id) & (chunks.c.number == number)
