"""Campaigns are archived and deleted, and announce their start, pause and end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select

from timebell.errors import Conflict, NotFound
from timebell.features.campaigns.store import actions, campaign_jobs, campaigns
from timebell.features.campaigns.store.tables import campaigns as campaign_table
from timebell.features.campaigns.store.tables import deliveries
from timebell.ids import new_id
from timebell.model.job import JobState
from timebell.model.payload import decode
from timebell.model.routes import Routes
from timebell.store.cluster import nodes
from timebell.store.cluster.nodes import Node
from timebell.store.jobs import repository
from timebell.store.schema import jobs, targets
from timebell.store.transaction import Transaction

from .test_campaigns import Sender, sender

__all__ = ["sender"]


def listed(sender: Sender, **options: Any) -> list[str]:
    return [each.id for each in sender.run(campaigns.list_campaigns, "default", 50, None, **options)]


def act(sender: Sender, action: Any, id_: str, *args: Any) -> Any:
    return sender.run(action, "default", id_, *args, sender.now)


def events(tx: Transaction) -> list[tuple[str, str]]:
    query = select(jobs.c.topic, jobs.c.payload, jobs.c.route).where(jobs.c.topic.startswith("timebell.campaign."))
    rows = tx.execute(query.order_by(jobs.c.id)).all()
    assert {row.route for row in rows} <= {"@http:named"}
    return [(row.topic.removeprefix("timebell.campaign."), decode(row.payload)["state"]) for row in rows]


def create_target(tx: Transaction, sender: Sender) -> None:
    tx.execute(insert(targets).values(
        tenant_id="default", name="crm", kind="http", options="{}", created_at=sender.now, updated_at=sender.now
    ))  # fmt: skip


def test_an_ended_campaign_is_archived_and_shown_again(sender: Sender) -> None:
    sender.register("phone-1")
    id_ = sender.make()
    with pytest.raises(Conflict) as caught:
        act(sender, actions.archive_campaign, id_, True)
    assert caught.value.code == "CAMPAIGN_STATE"
    sender.send_all(id_)
    for _ in range(2):
        assert act(sender, actions.archive_campaign, id_, True).archived_at == sender.now
    assert (listed(sender), listed(sender, archived=True)) == ([], [id_])
    act(sender, actions.archive_campaign, id_, False)
    assert (listed(sender), listed(sender, archived=True)) == ([id_], [])


def test_a_deleted_campaign_is_gone_and_its_records_are_removed(sender: Sender) -> None:
    sender.register(*(f"phone-{n}" for n in range(9)))
    id_, other = sender.make(), sender.make()
    opened, _ = sender.open(id_)
    with pytest.raises(Conflict):
        act(sender, actions.delete_campaign, id_)
    act(sender, actions.stop_campaign, id_, None)
    with pytest.raises(Conflict):
        act(sender, actions.delete_campaign, id_)  # its first chunk is still being sent
    sender.close(id_, opened, sender.send(opened))
    act(sender, actions.delete_campaign, id_)
    act(sender, actions.delete_campaign, other)  # before its start
    assert listed(sender) == []
    assert sender.get(id_) is None
    assert act(sender, actions.delete_campaign, id_) is None
    for _ in range(2):
        assert sender.run(campaigns.prune_campaigns, sender.now - timedelta(days=30), 1) == 1
    assert sender.run(lambda tx: tx.execute(select(deliveries)).all()) == []
    assert sender.run(lambda tx: tx.execute(select(campaign_table)).all()) == []


def test_the_phases_of_a_campaign_are_announced_once(sender: Sender) -> None:
    sender.register(*(f"phone-{n}" for n in range(20)))
    with pytest.raises(NotFound):
        sender.make(notify="crm")
    sender.run(create_target, sender)
    id_ = sender.make(notify="crm")
    assert sender.run(events) == []
    opened, _ = sender.open(id_)
    assert sender.run(campaigns.count_with_target, "default", "crm") == 1
    act(sender, actions.pause_campaign, id_, "a typo")
    act(sender, actions.pause_campaign, id_, "a typo")
    sender.close(id_, opened, sender.send(opened))
    sender.resume(id_)
    sender.send_all(id_)
    assert sender.run(events) == [
        ("started", "running"), ("paused", "paused"), ("resumed", "running"), ("ended", "completed"),
    ]  # fmt: skip
    assert sender.run(campaigns.count_with_target, "default", "crm") == 0
    sender.make()
    assert len(sender.run(events)) == 4


def test_the_nodes_that_send_campaigns_are_counted(sender: Sender) -> None:
    assert sender.run(campaign_jobs.count_sending_nodes) == 1
    for n, routes in enumerate(({"@campaign", "@push"}, {"@http"}, {"@campaign"}, {"@campaign"})):
        node = Node(new_id(sender.now), f"node-{n}", "1", "2026f", Routes(frozenset(routes)), 1, sender.now, sender.now)
        sender.run(nodes.announce, node)
    assert sender.run(campaign_jobs.count_sending_nodes) == 3
    sender.run(nodes.request_drain, node.id)
    assert sender.run(campaign_jobs.count_sending_nodes) == 2


def test_the_job_of_a_stopped_campaign_is_cancelled(sender: Sender) -> None:
    id_ = sender.make()
    job_id = sender.get(id_).job_id
    act(sender, actions.stop_campaign, id_, None)
    assert sender.run(repository.find_job, "default", job_id).state is JobState.CANCELLED


def test_a_stopped_campaign_ends_with_its_last_chunk(sender: Sender) -> None:
    sender.register(*(f"phone-{n}" for n in range(20)))
    sender.run(create_target, sender)
    id_ = sender.make(notify="crm")
    opened, _ = sender.open(id_)
    act(sender, actions.stop_campaign, id_, None)
    assert sender.run(events) == [("started", "running")]
    sender.close(id_, opened, sender.send(opened))
    assert sender.run(events)[1:] == [("ended", "stopped")]
