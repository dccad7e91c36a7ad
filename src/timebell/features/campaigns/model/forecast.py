"""The speed and the expected end of a campaign. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import fmean

from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign, ZoneProgress, next_zone

MIN_OUTAGE_SECONDS = 5.0
MIN_OUTAGE_GAPS = 10
"""The time between the ends of two chunks counts as an outage from MIN_OUTAGE_SECONDS on, if it is also this many times
the average of the shorter ones."""


@dataclass(frozen=True, slots=True)
class ChunkEnds:
    """Recently finished chunks in order: when each ended, and the number of their recipients."""

    times: Sequence[datetime] = ()
    recipients: int = 0

    def rate(self, now: datetime) -> float | None:
        """Return the recipients per second; None if fewer than two chunks have ended.

        The rate is measured between ends of chunks, so it is correct from the second chunk on, even if chunks are far
        apart. While no chunk ends for longer than usual, the rate falls. After the next end, that time does not count
        if it was an outage, such as the time until the chunks of a dead node are taken over.
        """
        if len(self.times) < 2:
            return None
        gaps = sorted((end - start).total_seconds() for start, end in pairwise(self.times))
        while len(gaps) > 1 and gaps[-1] > max(MIN_OUTAGE_SECONDS, MIN_OUTAGE_GAPS * fmean(gaps[:-1])):
            gaps.pop()
        pause = max(0.0, (now - self.times[-1]).total_seconds() - fmean(gaps))
        return self.recipients / len(self.times) * len(gaps) / max(sum(gaps) + pause, 0.001)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Speed, pause and expected end of a running campaign; None if unknown.

    `rate` is in recipients per second. While no zone is due, it waits until `waiting_until` for the zone
    `waiting_for` (None: the campaign has no zones).
    """

    rate: float | None = None
    ends_at: datetime | None = None
    waiting_until: datetime | None = None
    waiting_for: str | None = None


def forecast_end(campaign: Campaign, ends: ChunkEnds, now: datetime) -> Forecast:
    """Return the forecast of a campaign from its recently finished chunks."""
    if campaign.state is not CampaignState.RUNNING:
        return Forecast()
    due_times = sorted(_due_times(campaign, now), key=lambda due: due[0])
    waiting_until = waiting_for = None
    if due_times and due_times[0][0] > now and not campaign.open_chunks:
        waiting_until, waiting_for = due_times[0]
    rate = None if waiting_until is not None else ends.rate(now)
    remaining = max(0, (campaign.expected or 0) - campaign.opened + campaign.counts().pending)
    latest = max((at for at, _ in due_times), default=now)
    ends_at = None
    if rate and campaign.expected is not None:
        ends_at = max(latest, now + timedelta(seconds=remaining / rate))
    elif waiting_until is not None:
        ends_at = latest
    return Forecast(rate, ends_at, waiting_until, waiting_for)


def _due_times(campaign: Campaign, now: datetime) -> list[tuple[datetime, str | None]]:
    """Return when each zone that is not done is due, at the earliest now."""
    due = []
    for progress in campaign.zone_progress:
        copy = ZoneProgress.from_json(progress.to_json())  # next_zone marks zones as done
        found, at = next_zone([copy], campaign.plan, now)
        if found is not None:
            due.append((at, progress.zone))
    return due
