"""What a crash costs: at most the batch in flight, whenever it happens."""

from __future__ import annotations

from datetime import timedelta

import pytest

from timebell.errors import Conflict
from timebell.features.campaigns.store import actions, chunk_results, chunks, recipients
from timebell.features.campaigns.store.chunk_results import ChunkTakenOver, DeliveryResult
from timebell.features.campaigns.store.chunks import OpenedChunk

from .test_campaigns import S, Sender, sender

__all__ = ["sender"]

BATCH = 4


class Crash(Exception):
    """The node dies here."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "POST_BATCH_SIZE", BATCH)


def send_in_batches(sender: Sender, id_: str, opened: OpenedChunk, attempt: int, steps: list[int]) -> None:
    """Send a chunk like the engine, until `steps` (a mutable countdown) is used up."""

    def step() -> None:
        steps[0] -= 1
        if steps[0] < 0:
            raise Crash

    results: list[DeliveryResult] = []
    for start in range(0, len(opened.recipients), BATCH):
        batch = opened.recipients[start : start + BATCH]
        if start:
            sender.run(
                chunk_results.record_posted, id_, opened.number, attempt, results, batch[-1].id, tenant_id="default"
            )  # fmt: skip
        results = []
        for recipient in batch:
            step()
            sender.phones[recipient.token] = sender.phones.get(recipient.token, 0) + 1
            results.append(DeliveryResult(recipient, "accepted", None, "m"))
        step()
    sender.run(chunk_results.close_chunk, id_, opened.number, attempt, results, 0, sender.now)
    step()


@pytest.mark.parametrize("unknown", ["leave", "retry"])
def test_a_crash_at_any_point_leaves_at_most_a_batch_unknown(sender: Sender, unknown: str) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(10)))
    for point in range(14):
        sender.phones.clear()
        sender.now += S
        id_ = sender.make(chunkSize=10, unknown=unknown)
        opened, job = sender.open(id_)
        attempt = 1
        with pytest.raises(Crash):
            send_in_batches(sender, id_, opened, attempt, [point])
        again, _ = sender.open(id_, 2, job)
        with pytest.raises(ChunkTakenOver):  # the first node was only frozen
            last = opened.recipients[-1].id
            sender.run(chunk_results.record_posted, id_, opened.number, attempt, [], last, tenant_id="default")
        if again.recipients:
            send_in_batches(sender, id_, again, 2, [100])
        sender.send_all(id_)
        found = sender.get(id_)
        lost = {token for token, count in sender.phones.items() if count != 1}
        assert found.opened == found.accepted + found.unknown == 10
        assert found.unknown + found.possible_duplicates <= BATCH, point
        if unknown == "leave":
            assert not lost, "nobody has it twice"
            assert len(sender.phones) >= found.accepted
        else:
            assert (len(sender.phones), found.unknown) == (10, 0)
            assert sum(sender.phones.values()) - 10 <= found.possible_duplicates <= BATCH


def test_devices_with_dead_tokens_are_removed_with_their_batch(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(2 * BATCH)))
    id_ = sender.make(chunkSize=2 * BATCH)
    opened, job = sender.open(id_)
    dead, *others = opened.recipients[:BATCH]
    results = [DeliveryResult(dead, "refused", "UNREGISTERED", token_is_dead=True)]
    results += [DeliveryResult(each, "accepted", None, "m") for each in others]
    last = opened.recipients[-1].id
    sender.run(chunk_results.record_posted, id_, opened.number, 1, results, last, tenant_id="default")
    sender.open(id_, 2, job)  # the node died while it sent the second batch
    tokens = {device.token for device in sender.list_devices()}
    assert tokens == {each.token for each in opened.recipients} - {dead.token}


def test_attempts_and_possible_duplicates_are_counted_and_never_overwritten(sender: Sender) -> None:
    sender.register(*(f"phone-{n:04}" for n in range(3)))
    id_ = sender.make()
    job = sender.open(id_)[1]
    assert sender.open(id_, 2, job)[0].recipients == []  # all three were in flight
    sender.send_all(id_)
    for known in (0, 3, 6):
        assert (sender.get(id_).unknown, sender.get(id_).possible_duplicates) == (3, known)
        sender.run(actions.retry_campaign, "default", id_, include_unknown=True, now=sender.now)
        again, _ = sender.open(id_)
        state = "accepted" if known == 6 else "unknown"
        results = [DeliveryResult(each, state, None, is_uncertain=state == "unknown") for each in again.recipients]
        assert sender.close(id_, again, results) is False
        sender.send_all(id_)
    assert (sender.get(id_).state, sender.get(id_).possible_duplicates) == ("completed", 9)
    page = sender.run(recipients.list_deliveries, id_, 10, None, None)
    assert [(row["state"], row["sends"], row["unknown_sends"]) for row in page.items] == [("accepted", 4, 3)] * 3


def test_a_campaign_that_reached_nobody_failed(sender: Sender) -> None:
    sender.register("phone-0001", "phone-0002")
    for state, code, ends in (("refused", "SENDER_ID_MISMATCH", "failed"), ("accepted", None, "completed")):
        sender.now += timedelta(seconds=1)
        id_ = sender.make()
        opened, _ = sender.open(id_)
        sender.close(id_, opened, [DeliveryResult(each, state, code) for each in opened.recipients])
        sender.send_all(id_)
        assert sender.get(id_).state == ends
    with pytest.raises(Conflict):
        sender.edit(id_, title="Too late")
