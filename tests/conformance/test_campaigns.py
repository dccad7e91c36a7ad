"""Campaign chunks: each device is sent to once, despite crashes and changes during the campaign."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy import func, select

from timebell.features import FEATURES
from timebell.features.campaigns.model.campaign import CampaignState
from timebell.features.campaigns.model.campaign_plan import Campaign, CampaignPlan
from timebell.features.campaigns.model.device import validate_device
from timebell.features.campaigns.model.filters import Filters
from timebell.features.campaigns.store import actions, campaigns, chunk_results, chunks, definitions, devices
from timebell.features.campaigns.store.chunk_results import DeliveryResult
from timebell.features.campaigns.store.chunks import OpenedChunk
from timebell.features.campaigns.store.tables import deliveries
from timebell.ids import new_id
from timebell.store.dialects.base import Store
from timebell.store.jobs import erasure, repository
from timebell.store.transaction import Transaction

from .helpers import T0

S, H = timedelta(seconds=1), timedelta(hours=1)


class Sender:
    """Opens and closes chunks in place of the engine, and records messages in place of FCM."""

    def __init__(self, store: Store, runner: asyncio.Runner) -> None:
        self.store, self.runner, self.now = store, runner, T0
        self.phones: dict[str, int] = {}

    def run(self, operation: Any, *args: Any, **more: Any) -> Any:
        return self.runner.run(self.store.run(operation, *args, **more))

    def register(self, *tokens: str, at: datetime | None = None, **about: Any) -> None:
        self.run(
            devices.register_devices, "default", [(token, validate_device(about)) for token in tokens], at or self.now
        )

    def make(self, **spec: Any) -> str:
        sending = CampaignPlan.from_json({"title": "Hello", "chunkSize": 7, "chunkDelayMs": 0, **spec})
        made = Campaign(
            id=new_id(self.now), tenant_id="default", plan=sending, state=CampaignState.PENDING, send_at=self.now,
            timezone="UTC", created_at=self.now, updated_at=self.now,
        )  # fmt: skip
        self.run(definitions.create_campaign, made)
        return made.id

    def get(self, id_: str) -> Campaign:
        found: Campaign = self.run(campaigns.find_campaign, "default", id_)
        return found

    def open(
        self, id_: str, attempt: int = 1, job: tuple[int, str] | None = None
    ) -> tuple[OpenedChunk, tuple[int, str]]:
        """Open the chunk of the campaign's next job, or of a job that started before."""
        if job is None:
            found = self.get(id_)
            assert found.job_id is not None
            job = found.next_chunk, found.job_id
        return self.run(chunks.open_chunk, id_, *job, attempt, self.now), job

    def send(self, opened: OpenedChunk) -> list[DeliveryResult]:
        """Deliver to all recipients."""
        for each in opened.recipients:
            self.phones[each.token] = self.phones.get(each.token, 0) + 1
        return [DeliveryResult(each, "accepted", None, "m") for each in opened.recipients]

    def close(self, id_: str, opened: OpenedChunk, delivered: list[DeliveryResult], attempt: int = 1) -> Any:
        left = len(opened.recipients) - len(delivered)
        return self.run(chunk_results.close_chunk, id_, opened.number, attempt, delivered, left, self.now)

    def list_devices(self) -> list[Any]:
        page: Any = self.run(devices.list_devices, "default", 500, None, Filters(), None, self.now)
        return list(page.items)

    def delete(self, *tokens: str) -> None:
        self.run(devices.delete_by_token, "default", tokens)

    def edit(self, id_: str, **options: Any) -> None:
        def change(found: Campaign) -> Campaign:
            return replace(found, plan=CampaignPlan.from_json({**found.plan.to_json(), **options}))

        self.run(definitions.edit_campaign, "default", id_, change, None, self.now)

    def resume(self, id_: str, *, can_approve: bool = True) -> None:
        self.run(actions.resume_campaign, "default", id_, "ann", can_approve, self.now)

    def send_all(self, id_: str) -> None:
        while (found := self.get(id_)).state in ("pending", "running"):
            if found.job_id is None:
                return
            opened, _ = self.open(id_)
            if opened.recipients:
                self.close(id_, opened, self.send(opened))


@pytest.fixture
def sender(store: Store, runner: asyncio.Runner) -> Sender:
    return Sender(store, runner)


@pytest.mark.parametrize("seed", range(3))
def test_a_campaign_during_device_changes_ends_without_duplicates_or_gaps(sender: Sender, seed: int) -> None:
    random = Random(seed)
    there = [f"phone-{n:04}" for n in range(100)]
    sender.register(*there)
    sender.now += S
    id_ = sender.make()
    stayed, known, n = set(there), list(there), 0
    while sender.get(id_).ended_at is None:
        sender.now += S
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
        sender.now += S
        for _ in range(10):  # more devices register than are sent to: the campaign ends nevertheless
            n += 1
            known.append(f"later-{n:05}")
            sender.register(known[-1])
        for _ in range(3):
            gone = random.choice(known)
            sender.run(devices.delete_by_token, "default", [gone])
            stayed.discard(gone)
            if random.random() < 0.5:  # and registers again as a new device
                sender.register(gone)
        assert n < 1000
    assert set(sender.phones.values()) == {1}
    assert stayed <= set(sender.phones) <= set(there)


@pytest.mark.parametrize("seed", range(4))
def test_crashes_send_no_message_twice_and_every_recipient_is_accounted_for(sender: Sender, seed: int) -> None:
    random = Random(seed)
    sender.register(*(f"phone-{n:04}" for n in range(60)))
    id_ = sender.make()
    started_chunks: list[tuple[OpenedChunk, tuple[int, str], int, list[DeliveryResult]]] = []
    while sender.get(id_).ended_at is None:
        sender.now += S
        found = sender.get(id_)
        if found.job_id is not None and random.random() < 0.5:
            opened, job = sender.open(id_)
            if opened.recipients:
                started_chunks.append((opened, job, 1, sender.send(opened)))
        elif started_chunks:
            opened, job, attempt, delivered = started_chunks.pop(random.randrange(len(started_chunks)))
            if random.random() < 0.4:  # its node died before it stored the results; another one takes the job over
                again, _ = sender.open(id_, attempt + 1, job)
                assert again.recipients == []
                assert sender.close(id_, opened, delivered, attempt) is None  # the first node was only frozen
            else:
                assert sender.close(id_, opened, delivered, attempt) is False
    found = sender.get(id_)
    assert set(sender.phones.values()) == {1}
    assert len(sender.phones) == found.opened == found.accepted + found.unknown == 60
    assert found.state == ("partly_sent" if found.unknown else "completed")
    assert found.ended_at == sender.now


def test_a_repeated_job_opens_one_chunk(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)))
    id_ = sender.make()
    first, job = sender.open(id_)
    second, _ = sender.open(id_, 1, (job[0], new_id(sender.now)))
    assert (len(first.recipients), second.recipients) == (7, [])
    sender.run(actions.pause_campaign, "default", id_, None, sender.now)
    sender.run(actions.resume_campaign, "default", id_, None, True, sender.now)
    assert sender.open(id_, 1, (2, job[1]))[0].recipients == []  # the job was replaced by a resume


@pytest.mark.parametrize(("options", "hours"), [({}, 6), ({"ttl": 7200}, 2), ({"expiresAt": T0 + 3 * H}, 3)])
def test_only_retryable_recipients_are_retried_while_the_message_is_of_use(
    sender: Sender, options: dict[str, Any], hours: int
) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(5)))
    id_ = sender.make(**{name: str(value) for name, value in options.items()} if "expiresAt" in options else options)
    opened, job = sender.open(id_)
    delivered = sender.send(opened)[:3]
    assert sender.close(id_, opened, delivered) is True
    assert sender.close(id_, opened, delivered) is True  # a repeated call writes nothing
    assert sender.get(id_).accepted == 3
    started_at = sender.now
    for attempt, waited in enumerate((H, hours * H - S, hours * H), 2):
        sender.now = started_at + waited
        opened, _ = sender.open(id_, attempt, job)
        assert [each.token for each in opened.recipients] == ["phone-0003", "phone-0004"]
        assert sender.close(id_, opened, [], attempt) is (waited < hours * H)
    if sender.get(id_).ended_at is None:
        sender.open(id_)  # the job that finishes the walk
    found = sender.get(id_)
    assert (found.state, found.accepted, found.unsent) == ("partly_sent", 3, 2)
    sender.run(actions.retry_campaign, "default", id_, include_unknown=False, now=sender.now)
    sender.send_all(id_)
    assert (sender.get(id_).state, sender.get(id_).accepted, sender.get(id_).unsent) == ("completed", 5, 0)


def test_local_time_delivery_reaches_each_zone_and_a_moved_device_once(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, 12, tzinfo=UTC)
    for zone in ("Asia/Seoul", "Europe/Berlin", "America/New_York"):
        sender.register(f"phone-in-{zone}", timezone=zone)
    sender.register("phone-of-nowhere", "phone-of-traveller", timezone=None)
    sender.register("phone-of-traveller", timezone="Asia/Seoul")
    id_ = sender.make(localTime="2027-03-02T09:00")
    got: dict[str, str] = {}
    while sender.get(id_).ended_at is None:
        found = sender.get(id_)
        sender.now = max(sender.now, sender.run(due_at, found.job_id))
        opened, _ = sender.open(id_)
        for each in opened.recipients:
            got[each.token] = sender.now.isoformat(timespec="minutes")
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
            sender.register("phone-of-traveller", timezone="America/New_York")  # during the campaign
    assert got == {
        "phone-in-Asia/Seoul": "2027-03-02T00:00+00:00",
        "phone-of-traveller": "2027-03-02T00:00+00:00",
        "phone-in-Europe/Berlin": "2027-03-02T08:00+00:00",
        "phone-of-nowhere": "2027-03-02T09:00+00:00",
        "phone-in-America/New_York": "2027-03-02T14:00+00:00",
    }
    assert set(sender.phones.values()) == {1}


def test_quiet_hours_delay_delivery(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, 22, tzinfo=UTC)
    sender.register("phone-in-london", timezone="Europe/London")
    sender.register("phone-in-tokyo", timezone="Asia/Tokyo")
    id_ = sender.make(quietHours={"start": "21:00", "end": "08:00"})
    opened, _ = sender.open(id_)
    assert opened.recipients == []  # 22:00 in London, 07:00 in Tokyo
    assert sender.run(due_at, sender.get(id_).job_id) == datetime(2027, 3, 1, 23, tzinfo=UTC)


def due_at(tx: Transaction, job_id: str) -> datetime:
    from timebell.store.schema import jobs

    at: datetime = tx.execute(select(jobs.c.run_at).where(jobs.c.id == job_id)).scalar_one()
    return at


def test_filters_match_the_same_devices_on_every_store(sender: Sender) -> None:
    sender.register("phone-0001", attributes={"plan": 'a "quoted" plan', "n": 1}, topics=["a", "ab"])
    sender.register("phone-0002", attributes={"PLAN": "x", "n": 12}, topics=["A"], marketing_on=True)
    for filters, count in (
        ({"attributes": {"plan": 'a "quoted" plan'}}, 1), ({"attributes": {"n": 1}}, 1), ({"topic": "a"}, 1),
        ({"attributes": {"plan": "x"}}, 0), ({"topic": "b"}, 0), ({"marketingOnOff": "Y"}, 1),
    ):  # fmt: skip
        assert sender.run(devices.count_devices, "default", Filters.from_json(filters), sender.now) == count, filters


def test_pruning_a_campaign_deletes_its_delivery_records(sender: Sender) -> None:
    sender.register("phone-0001")
    id_ = sender.make()
    sender.send_all(id_)
    assert sender.run(campaigns.prune_campaigns, sender.now, 10) == 0
    assert sender.run(campaigns.prune_campaigns, sender.now + S, 10) == 1
    assert sender.run(lambda tx: tx.execute(select(func.count()).select_from(deliveries)).scalar_one()) == 0


def test_a_campaign_whose_job_was_cancelled_is_resumed(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)))
    id_ = sender.make()
    opened, _ = sender.open(id_)
    sender.close(id_, opened, sender.send(opened))
    job = sender.get(id_).job_id
    sender.run(actions.resume_campaign, "default", id_, None, True, sender.now)
    assert sender.get(id_).job_id == job  # it is running, so there is nothing to resume
    sender.run(repository.cancel, "default", job, sender.now)
    sender.run(actions.resume_campaign, "default", id_, None, True, sender.now)
    assert sender.get(id_).job_id != job
    sender.send_all(id_)
    assert sorted(sender.phones.values()) == [1] * 20


def test_erasure_deletes_the_devices_of_an_owner(sender: Sender) -> None:
    sender.register("phone-0001", user_id="ann")
    sender.register("phone-0002", user_id="bob")
    sender.run(erasure.erase, "default", "ann", sender.now, FEATURES)
    left = sender.run(devices.list_devices, "default", 10, None, Filters(), None, sender.now)
    assert [device.token for device in left.items] == ["phone-0002"]


def test_a_device_whose_token_was_replaced_during_a_send_stays(sender: Sender) -> None:
    sender.register("phone-0001", "phone-0002", user_id="ann")
    dead = [(each.id, each.token) for each in sender.list_devices()]
    sender.run(devices.replace_token, "default", "phone-0001", "phone-0003", sender.now)
    assert sender.run(devices.delete_dead, "default", dead) == 1
    assert [each.token for each in sender.list_devices()] == ["phone-0003"]


def test_a_canary_without_failures_passes_at_an_error_rate_of_zero(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)))
    id_ = sender.make(canary={"size": 5, "maxErrorRate": 0})
    sender.send_all(id_)
    found = sender.get(id_)
    assert (found.state, found.accepted) == (CampaignState.COMPLETED, 20)


def test_a_change_is_judged_by_campaigns_of_the_same_tenant(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(3)))
    first = sender.make()
    sender.run(
        definitions.edit_campaign, "default", first, lambda found: replace(found, name="daily"), None, sender.now
    )
    sender.send_all(first)
    found = sender.get(first)
    assert found.opened == 3
    sender.now += S
    for tenant_id, previous in (("default", 3), ("acme", None)):
        another = replace(found, id=new_id(sender.now), tenant_id=tenant_id)
        assert sender.run(campaigns.previous_recipient_count, another) == previous
