"""Blocking variants of the clients of triggers, for `app.sync`."""

from __future__ import annotations

from timebell.features.triggers.client.connections import Connections
from timebell.features.triggers.client.triggers import Triggers
from timebell.portal import BlockingMethod, BlockingNamespace


class BlockingTriggers(BlockingNamespace[Triggers]):
    """`app.sync.triggers`."""

    put_source = BlockingMethod(Triggers.put_source)
    get_source = BlockingMethod(Triggers.get_source)
    list_sources = BlockingMethod(Triggers.list_sources)
    delete_source = BlockingMethod(Triggers.delete_source)
    put_items = BlockingMethod(Triggers.put_items)
    list_items = BlockingMethod(Triggers.list_items)
    put = BlockingMethod(Triggers.put)
    get = BlockingMethod(Triggers.get)
    list = BlockingMethod(Triggers.list)
    pause = BlockingMethod(Triggers.pause)
    resume = BlockingMethod(Triggers.resume)
    scan = BlockingMethod(Triggers.scan)
    get_item = BlockingMethod(Triggers.get_item)
    why = BlockingMethod(Triggers.why)
    audit = BlockingMethod(Triggers.audit)
    list_not_fired = BlockingMethod(Triggers.list_not_fired)
    fire = BlockingMethod(Triggers.fire)
    skip = BlockingMethod(Triggers.skip)
    delete = BlockingMethod(Triggers.delete)


class BlockingConnections(BlockingNamespace[Connections]):
    """`app.sync.connections`."""

    put = BlockingMethod(Connections.put)
    get = BlockingMethod(Connections.get)
    list = BlockingMethod(Connections.list)
    delete = BlockingMethod(Connections.delete)
