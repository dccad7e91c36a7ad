"""Node registration, and the lease and fence of the leader."""

from __future__ import annotations

import asyncio

from timebell.ids import new_id
from timebell.store.cluster import nodes

from .helpers import NODE, OTHER_NODE, T0, Routes, Store, after, replace, stored


def node(id_: str = NODE, **fields: object) -> nodes.Node:
    made = nodes.Node(id_, "alpha", "1.0", "2026c", Routes(frozenset({"a"}), frozenset({"b."})), 0, T0, T0)
    return replace(made, **fields)  # type: ignore[arg-type]


async def take(store: Store, seen: nodes.Lease | None = None, by: str = NODE) -> nodes.Lease | None:
    if seen is None:
        seen = await store.run(nodes.get_lease)
    return await store.run(nodes.acquire_lease, by, seen, T0)


@stored
async def test_a_node_is_listed_as_it_announced_itself(store: Store) -> None:
    announced = node(secret_keys=("ab12", "cd34"))
    await store.run(nodes.announce, announced)
    assert await store.run(nodes.list_nodes) == [announced]


def test_nodes_share_a_secret_key_if_one_of_each_is_the_same() -> None:
    cases: list[tuple[str, str, bool]] = [
        ("", "", True), ("a", "a", True), ("b a", "a", True), ("a", "b a", True), ("a", "b", False), ("a", "", False),
    ]  # fmt: skip
    for own, other, expected in cases:
        one, two = node(secret_keys=tuple(own.split())), node(OTHER_NODE, secret_keys=tuple(other.split()))
        assert one.shares_secret_key(two) is expected, (own, other)


@stored
async def test_a_repeated_announcement_updates_the_same_row(store: Store) -> None:
    await store.run(nodes.announce, node())
    renewed = node(heartbeat=7, seen_at=after(seconds=5), routes=Routes(all_topics=True))
    await store.run(nodes.announce, renewed)
    await store.run(nodes.announce, node(OTHER_NODE))
    assert await store.run(nodes.list_nodes) == sorted([renewed, node(OTHER_NODE)], key=lambda one: one.id)


@stored
async def test_a_deregistered_node_is_not_listed_and_not_leader(store: Store) -> None:
    await store.run(nodes.announce, node())
    await store.run(nodes.announce, node(OTHER_NODE))
    lease = await take(store)
    assert lease is not None
    await store.run(nodes.remove_nodes, [NODE])
    assert await store.run(nodes.list_nodes) == [node(OTHER_NODE)]
    assert not await store.run(nodes.verify_leadership, NODE, lease.fence)
    assert (await store.run(nodes.get_lease)).holder is None


@stored
async def test_a_deregistered_follower_does_not_change_leadership(store: Store) -> None:
    lease = await take(store)
    assert lease is not None
    await store.run(nodes.remove_nodes, [OTHER_NODE])
    assert await store.run(nodes.verify_leadership, NODE, lease.fence)


@stored
async def test_the_first_node_takes_the_lease_and_every_change_raises_the_fence(store: Store) -> None:
    assert await store.run(nodes.get_lease) == nodes.Lease(None, 0, 0, None)
    fences = []
    for by in (NODE, OTHER_NODE, NODE, NODE):
        taken = await take(store, by=by)
        assert taken is not None
        assert taken == await store.run(nodes.get_lease)
        fences.append(taken.fence)
    assert fences == [1, 2, 3, 4]


@stored
async def test_a_lease_changed_since_it_was_read_cannot_be_taken(store: Store) -> None:
    first = await take(store)
    assert first is not None
    seen = await store.run(nodes.get_lease)
    assert await store.run(nodes.renew_lease, NODE, first.fence)
    assert await take(store, seen, OTHER_NODE) is None
    assert await take(store, nodes.Lease(None, 0, 0, None), OTHER_NODE) is None
    assert (await store.run(nodes.get_lease)).holder == NODE


@stored
async def test_a_leader_that_lost_its_lease_can_neither_renew_nor_lead(store: Store) -> None:
    old = await take(store)
    assert old is not None
    new = await take(store, by=OTHER_NODE)
    assert new is not None
    assert not await store.run(nodes.renew_lease, NODE, old.fence)
    assert not await store.run(nodes.verify_leadership, NODE, old.fence)
    assert not await store.run(nodes.renew_lease, NODE, new.fence)
    assert await store.run(nodes.renew_lease, OTHER_NODE, new.fence)
    assert await store.run(nodes.verify_leadership, OTHER_NODE, new.fence)


@stored
async def test_an_earlier_fence_is_void_even_for_the_same_node(store: Store) -> None:
    first, second = await take(store), await take(store)
    assert first is not None
    assert second is not None
    assert not await store.run(nodes.verify_leadership, NODE, first.fence)
    assert await store.run(nodes.verify_leadership, NODE, second.fence)


@stored
async def test_of_simultaneous_candidates_one_leads(store: Store) -> None:
    for _ in range(3):
        seen = await store.run(nodes.get_lease)
        taken = await asyncio.gather(*(take(store, seen, new_id(T0)) for _ in range(6)))
        assert len([lease for lease in taken if lease is not None]) == 1


@stored
async def test_alerts_outlive_the_leader_that_stored_them(store: Store) -> None:
    assert await store.run(nodes.get_alerts) == {}
    assert await take(store) is not None
    await store.run(nodes.save_alerts, {"DOWN": "It is down."})
    assert await take(store, by=OTHER_NODE) is not None
    assert await store.run(nodes.get_alerts) == {"DOWN": "It is down."}
    await store.run(nodes.save_alerts, {})
    assert await store.run(nodes.get_alerts) == {}


@stored
async def test_the_last_leader_is_stored_with_its_last_renewal(store: Store) -> None:
    await store.run(nodes.announce, node(seen_at=after(seconds=30), slots=16, running=3, clock_ahead=-4))
    await store.run(nodes.announce, node(OTHER_NODE, name="beta"))
    (first, _) = await store.run(nodes.list_nodes)
    assert (first.slots, first.running, first.clock_ahead) == (16, 3, -4)
    lease = await take(store)
    assert lease is not None
    # Its last heartbeat was at 30 s; there was no leader until the other node took the lease at 90 s.
    assert await store.run(nodes.acquire_lease, OTHER_NODE, lease, after(seconds=90)) is not None
    await store.run(nodes.remove_nodes, [OTHER_NODE], after(seconds=100))
    assert await store.run(nodes.list_leaderships, 10) == [
        nodes.Leadership(2, OTHER_NODE, "beta", after(seconds=90), after(seconds=100), resigned=True),
        nodes.Leadership(1, NODE, "alpha", T0, after(seconds=30), resigned=False),
    ]
    assert len(await store.run(nodes.list_leaderships, 1)) == 1
