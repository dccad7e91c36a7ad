"""Walks and chunks on each store: they end, repeat nobody, miss nobody, whatever dies and changes on the way."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy import func, select

from timebell.ids import new_id
from timebell.model.audience import Filters, checked
from timebell.model.campaign import CampaignState
from timebell.model.campaign_plan import Campaign, Sending
from timebell.store.campaigns import campaigns, chunks, devices
from timebell.store.campaigns.chunks import Opened, Told
from timebell.store.campaigns.tables import deliveries
from timebell.store.dialects.base import Store
from timebell.store.jobs import erasure, repository
from timebell.store.transaction import Transaction

from .helpers import T0

S = timedelta(seconds=1)


class Sender:
    """Nodes that open and close chunks, in the place of the engine; the phones, in the place of FCM."""

    def __init__(self, store: Store, runner: asyncio.Runner) -> None:
        self.store, self.runner, self.now = store, runner, T0
        self.phones: dict[str, int] = {}

    def run(self, operation: Any, *args: Any, **more: Any) -> Any:
        return self.runner.run(self.store.run(operation, *args, **more))

    def register(self, *tokens: str, at: datetime | None = None, **about: Any) -> None:
        self.run(devices.register, "default", [(token, checked(about)) for token in tokens], at or self.now)

    def make(self, **spec: Any) -> str:
        sending = Sending.read({"title": "Hello", "chunkSize": 7, "chunkDelayMs": 0, **spec})
        made = Campaign(
            id=new_id(self.now), tenant_id="default", sending=sending, state=CampaignState.PENDING, send_at=self.now,
            timezone="UTC", created_at=self.now, updated_at=self.now,
        )  # fmt: skip
        self.run(campaigns.create, made, self.now)
        return made.id

    def get(self, id_: str) -> Campaign:
        found: Campaign = self.run(campaigns.find, "default", id_)
        return found

    def open(self, id_: str, attempt: int = 1, job: tuple[int, str] | None = None) -> tuple[Opened, tuple[int, str]]:
        """Open the chunk of the campaign's next job, or of one that began before."""
        if job is None:
            found = self.get(id_)
            assert found.job_id is not None
            job = found.next_chunk, found.job_id
        return self.run(chunks.open_chunk, id_, *job, attempt, self.now), job

    def send(self, opened: Opened) -> list[Told]:
        """All get it."""
        for each in opened.recipients:
            self.phones[each.token] = self.phones.get(each.token, 0) + 1
        return [Told(each, "accepted", None, "m") for each in opened.recipients]

    def close(self, id_: str, opened: Opened, told: list[Told], attempt: int = 1) -> Any:
        left = len(opened.recipients) - len(told)
        return self.run(chunks.close_chunk, id_, opened.number, attempt, told, left, self.now)

    def send_all(self, id_: str) -> None:
        while self.get(id_).state == "running" or self.get(id_).started_at is None:
            opened, _ = self.open(id_)
            if opened.recipients:
                self.close(id_, opened, self.send(opened))


@pytest.fixture
def sender(store: Store, runner: asyncio.Runner) -> Sender:
    return Sender(store, runner)


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_among_changes_ends_and_repeats_and_misses_nobody(sender: Sender, seed: int) -> None:
    random = Random(seed)
    there = [f"phone-{n:04}" for n in range(100)]
    sender.register(*there)
    sender.now += S
    id_ = sender.make()
    stayed, known, n = set(there), list(there), 0
    while sender.get(id_).state != "completed":
        sender.now += S
        opened, _ = sender.open(id_)
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
        sender.now += S
        for _ in range(10):  # more come than it sends to in the meantime: it ends all the same
            n += 1
            known.append(f"later-{n:05}")
            sender.register(known[-1])
        for _ in range(3):
            gone = random.choice(known)
            sender.run(devices.remove, "default", [gone])
            stayed.discard(gone)
            if random.random() < 0.5:  # and comes back, as somebody new
                sender.register(gone)
        assert n < 1000
    assert set(sender.phones.values()) == {1}
    assert stayed <= set(sender.phones) <= set(there)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_dies_nobody_gets_it_twice_and_everybody_is_accounted_for(sender: Sender, seed: int) -> None:
    random = Random(seed)
    sender.register(*(f"phone-{n:04}" for n in range(60)))
    id_ = sender.make()
    begun: list[tuple[Opened, tuple[int, str], int, list[Told]]] = []
    while sender.get(id_).state != "completed":
        sender.now += S
        found = sender.get(id_)
        if found.job_id is not None and random.random() < 0.5:
            opened, job = sender.open(id_)
            if opened.recipients:
                begun.append((opened, job, 1, sender.send(opened)))
        elif begun:
            opened, job, attempt, told = begun.pop(random.randrange(len(begun)))
            if random.random() < 0.4:  # its node died before it wrote what it knew; another takes the job over
                again, _ = sender.open(id_, attempt + 1, job)
                assert again.recipients == []
                assert sender.close(id_, opened, told, attempt) is None  # and the first one was only frozen
            else:
                assert sender.close(id_, opened, told, attempt) is False
    found = sender.get(id_)
    assert set(sender.phones.values()) == {1}
    assert len(sender.phones) == found.opened == found.accepted + found.unknown == 60
    assert found.ended_at == sender.now


def test_a_job_that_comes_twice_opens_one_chunk(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)))
    id_ = sender.make()
    first, job = sender.open(id_)
    second, _ = sender.open(id_, 1, (job[0], new_id(sender.now)))
    assert (len(first.recipients), second.recipients) == (7, [])
    sender.run(campaigns.pause, "default", id_, None, sender.now)
    sender.run(campaigns.resume, "default", id_, None, True, sender.now)
    assert sender.open(id_, 1, (2, job[1]))[0].recipients == []  # of a job that a resume has replaced


def test_what_is_tried_again_is_those_alone_and_not_for_ever(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(5)))
    id_ = sender.make()
    opened, job = sender.open(id_)
    told = sender.send(opened)[:3]
    assert sender.close(id_, opened, told) is True
    assert sender.close(id_, opened, told) is True  # asked again, it is written once
    assert sender.get(id_).accepted == 3
    for attempt in (2, 3, 4):
        opened, _ = sender.open(id_, attempt, job)
        assert [each.token for each in opened.recipients] == ["phone-0003", "phone-0004"]
        assert sender.close(id_, opened, [], attempt) is (attempt < 4)
    found = sender.get(id_)
    assert (found.state, found.accepted, found.unsent) == ("completed", 3, 2)
    sender.run(campaigns.retry, "default", id_, unknown=False, now=sender.now)
    sender.send_all(id_)
    assert (sender.get(id_).accepted, sender.get(id_).unsent) == (5, 0)


def test_everybody_gets_it_at_their_own_nine_o_clock_and_a_traveller_once(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, 12, tzinfo=UTC)
    for zone in ("Asia/Seoul", "Europe/Berlin", "America/New_York"):
        sender.register(f"phone-in-{zone}", timezone=zone)
    sender.register("phone-of-nowhere", "phone-of-traveller", timezone=None)
    sender.register("phone-of-traveller", timezone="Asia/Seoul")
    id_ = sender.make(localTime="2027-03-02T09:00")
    got: dict[str, str] = {}
    while sender.get(id_).state != "completed":
        found = sender.get(id_)
        sender.now = max(sender.now, sender.run(_due, found.job_id))
        opened, _ = sender.open(id_)
        for each in opened.recipients:
            got[each.token] = sender.now.isoformat(timespec="minutes")
        if opened.recipients:
            sender.close(id_, opened, sender.send(opened))
            sender.register("phone-of-traveller", timezone="America/New_York")  # on the way
    assert got == {
        "phone-in-Asia/Seoul": "2027-03-02T00:00+00:00",
        "phone-of-traveller": "2027-03-02T00:00+00:00",
        "phone-in-Europe/Berlin": "2027-03-02T08:00+00:00",
        "phone-of-nowhere": "2027-03-02T09:00+00:00",
        "phone-in-America/New_York": "2027-03-02T14:00+00:00",
    }
    assert set(sender.phones.values()) == {1}


def test_nobody_is_woken(sender: Sender) -> None:
    sender.now = datetime(2027, 3, 1, 22, tzinfo=UTC)
    sender.register("phone-in-london", timezone="Europe/London")
    sender.register("phone-in-tokyo", timezone="Asia/Tokyo")
    id_ = sender.make(quietHours={"start": "21:00", "end": "08:00"})
    opened, _ = sender.open(id_)
    assert opened.recipients == []  # it is 22:00 there and 7:00 here
    assert sender.run(_due, sender.get(id_).job_id) == datetime(2027, 3, 1, 23, tzinfo=UTC)


def _due(tx: Transaction, job_id: str) -> datetime:
    from timebell.store.schema import jobs

    at: datetime = tx.execute(select(jobs.c.run_at).where(jobs.c.id == job_id)).scalar_one()
    return at


def test_filters_mean_the_same_on_every_store(sender: Sender) -> None:
    sender.register("phone-0001", attributes={"plan": 'a "quoted" plan', "n": 1}, topics=["a", "ab"])
    sender.register("phone-0002", attributes={"PLAN": "x", "n": 12}, topics=["A"], marketing_on=True)
    for filters, count in (
        ({"attributes": {"plan": 'a "quoted" plan'}}, 1), ({"attributes": {"n": 1}}, 1), ({"topic": "a"}, 1),
        ({"attributes": {"plan": "x"}}, 0), ({"topic": "b"}, 0), ({"marketingOnOff": "Y"}, 1),
    ):  # fmt: skip
        assert sender.run(devices.count, "default", Filters.read(filters)) == count, filters


def test_the_ledger_goes_with_its_campaign(sender: Sender) -> None:
    sender.register("phone-0001")
    id_ = sender.make()
    sender.send_all(id_)
    assert sender.run(campaigns.prune, sender.now, 10) == 0
    assert sender.run(campaigns.prune, sender.now + S, 10) == 1
    assert sender.run(lambda tx: tx.execute(select(func.count()).select_from(deliveries)).scalar_one()) == 0


def test_one_whose_job_was_cancelled_is_resumed(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(20)))
    id_ = sender.make()
    opened, _ = sender.open(id_)
    sender.close(id_, opened, sender.send(opened))
    job = sender.get(id_).job_id
    sender.run(campaigns.resume, "default", id_, None, True, sender.now)
    assert sender.get(id_).job_id == job  # it runs: there is nothing to resume
    sender.run(repository.cancel, "default", job, sender.now)
    sender.run(campaigns.resume, "default", id_, None, True, sender.now)
    assert sender.get(id_).job_id != job
    sender.send_all(id_)
    assert sorted(sender.phones.values()) == [1] * 20


def test_the_devices_of_a_person_are_erased(sender: Sender) -> None:
    sender.register("phone-0001", user_id="ann")
    sender.register("phone-0002", user_id="bob")
    sender.run(erasure.erase, "default", "ann", sender.now)
    left = sender.run(devices.page, "default", 10, None, Filters(), None)
    assert [device.token for device in left.items] == ["phone-0002"]
