"""Blocking variants of the clients of campaigns, for `app.sync`."""

from __future__ import annotations

from timebell.features.campaigns.client.audiences import Audiences
from timebell.features.campaigns.client.campaigns import Campaigns
from timebell.features.campaigns.client.devices import Devices
from timebell.features.campaigns.client.segments import Segments
from timebell.portal import BlockingMethod, BlockingNamespace


class BlockingCampaigns(BlockingNamespace[Campaigns]):
    """`app.sync.campaigns`."""

    create = BlockingMethod(Campaigns.create)
    repeat = BlockingMethod(Campaigns.repeat)
    edit = BlockingMethod(Campaigns.edit)
    get = BlockingMethod(Campaigns.get)
    forecast = BlockingMethod(Campaigns.forecast)
    list = BlockingMethod(Campaigns.list)
    start = BlockingMethod(Campaigns.start)
    pause = BlockingMethod(Campaigns.pause)
    resume = BlockingMethod(Campaigns.resume)
    stop = BlockingMethod(Campaigns.stop)
    archive = BlockingMethod(Campaigns.archive)
    delete = BlockingMethod(Campaigns.delete)
    retry = BlockingMethod(Campaigns.retry)
    test = BlockingMethod(Campaigns.test)
    preview = BlockingMethod(Campaigns.preview)
    results = BlockingMethod(Campaigns.results)
    report_open = BlockingMethod(Campaigns.report_open)
    timetable = BlockingMethod(Campaigns.timetable)
    deliveries = BlockingMethod(Campaigns.deliveries)
    remaining = BlockingMethod(Campaigns.remaining)
    chunks = BlockingMethod(Campaigns.chunks)


class BlockingAudiences(BlockingNamespace[Audiences]):
    """`app.sync.audiences`."""

    put = BlockingMethod(Audiences.put)
    get = BlockingMethod(Audiences.get)
    list = BlockingMethod(Audiences.list)
    refresh = BlockingMethod(Audiences.refresh)
    delete = BlockingMethod(Audiences.delete)


class BlockingDevices(BlockingNamespace[Devices]):
    """`app.sync.devices`."""

    register = BlockingMethod(Devices.register)
    register_many = BlockingMethod(Devices.register_many)
    refresh = BlockingMethod(Devices.refresh)
    get = BlockingMethod(Devices.get)
    delete = BlockingMethod(Devices.delete)
    delete_tokens = BlockingMethod(Devices.delete_tokens)
    list = BlockingMethod(Devices.list)
    count = BlockingMethod(Devices.count)


class BlockingSegments(BlockingNamespace[Segments]):
    """`app.sync.segments`."""

    put = BlockingMethod(Segments.put)
    get = BlockingMethod(Segments.get)
    count = BlockingMethod(Segments.count)
    list = BlockingMethod(Segments.list)
    delete = BlockingMethod(Segments.delete)
