"""`app.sync`: blocking variants of the app's methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from timebell.client.schedules import Schedules
from timebell.client.secrets import Secrets
from timebell.client.targets import Targets
from timebell.facade import FacadeMixin
from timebell.portal import BlockingMethod, BlockingNamespace, Portal

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.features.campaigns.client.sync import (
        BlockingAudiences,
        BlockingCampaigns,
        BlockingDevices,
        BlockingSegments,
    )
    from timebell.features.triggers.client.sync import BlockingConnections, BlockingTriggers


class BlockingSchedules(BlockingNamespace[Schedules]):
    """`app.sync.schedules`."""

    get = BlockingMethod(Schedules.get)
    list = BlockingMethod(Schedules.list)
    pause = BlockingMethod(Schedules.pause)
    resume = BlockingMethod(Schedules.resume)
    trigger = BlockingMethod(Schedules.trigger)
    backfill = BlockingMethod(Schedules.backfill)
    release = BlockingMethod(Schedules.release)
    backlogs = BlockingMethod(Schedules.backlogs)
    skip = BlockingMethod(Schedules.skip)
    move = BlockingMethod(Schedules.move)
    undo = BlockingMethod(Schedules.undo)
    history = BlockingMethod(Schedules.history)
    revert = BlockingMethod(Schedules.revert)
    delete = BlockingMethod(Schedules.delete)
    upcoming = BlockingMethod(Schedules.upcoming)


class BlockingTargets(BlockingNamespace[Targets]):
    """`app.sync.targets`."""

    put = BlockingMethod(Targets.put)
    get = BlockingMethod(Targets.get)
    list = BlockingMethod(Targets.list)
    delete = BlockingMethod(Targets.delete)
    enable = BlockingMethod(Targets.enable)
    rotate_secret = BlockingMethod(Targets.rotate_secret)
    test = BlockingMethod(Targets.test)


class BlockingSecrets(BlockingNamespace[Secrets]):
    """`app.sync.secrets`."""

    put = BlockingMethod(Secrets.put)
    get = BlockingMethod(Secrets.get)
    list = BlockingMethod(Secrets.list)
    delete = BlockingMethod(Secrets.delete)


class Blocking(BlockingNamespace[FacadeMixin]):
    """`app.sync`, for scripts, Flask and Django. Thread-safe; raises BLOCKING_IN_LOOP if called in an event loop."""

    schedule_at = BlockingMethod(FacadeMixin.schedule_at)
    schedule_in = BlockingMethod(FacadeMixin.schedule_in)
    schedule_many = BlockingMethod(FacadeMixin.schedule_many)
    schedule_repeat = BlockingMethod(FacadeMixin.schedule_repeat)
    save_calendar = BlockingMethod(FacadeMixin.save_calendar)
    calendar = BlockingMethod(FacadeMixin.calendar)
    cancel = BlockingMethod(FacadeMixin.cancel)
    cancel_all = BlockingMethod(FacadeMixin.cancel_all)
    reschedule = BlockingMethod(FacadeMixin.reschedule)
    retry = BlockingMethod(FacadeMixin.retry)
    redeliver = BlockingMethod(FacadeMixin.redeliver)
    erase = BlockingMethod(FacadeMixin.erase)
    get = BlockingMethod(FacadeMixin.get)
    wait = BlockingMethod(FacadeMixin.wait)
    list = BlockingMethod(FacadeMixin.list)
    pause_queue = BlockingMethod(FacadeMixin.pause_queue)
    resume_queue = BlockingMethod(FacadeMixin.resume_queue)
    pause_all = BlockingMethod(FacadeMixin.pause_all)
    resume_all = BlockingMethod(FacadeMixin.resume_all)
    repair = BlockingMethod(FacadeMixin.repair)
    audit = BlockingMethod(FacadeMixin.audit)
    why = BlockingMethod(FacadeMixin.why)

    campaigns: BlockingCampaigns
    audiences: BlockingAudiences
    segments: BlockingSegments
    devices: BlockingDevices
    triggers: BlockingTriggers
    connections: BlockingConnections

    def __init__(self, app: Timebell) -> None:
        super().__init__(Portal(app), lambda clone: clone)
        self.schedules = BlockingSchedules(self._portal, lambda clone: clone.schedules)
        self.targets = BlockingTargets(self._portal, lambda clone: clone.targets)
        self.secrets = BlockingSecrets(self._portal, lambda clone: clone.secrets)
        for feature in app.features:
            self.__dict__.update(feature.create_blocking_clients(self._portal))

    def open(self) -> None:
        """Open the store; every method does so itself. Raises StoreUnreachable, SchemaOutdated."""
        self._portal.call(lambda app: app.open())

    def upgrade(self) -> str:
        """Create the tables, or upgrade them to this release; return their version."""
        return self._portal.call(lambda app: app.upgrade())

    def close(self) -> None:
        """Close the connections; the next call opens them again. Also runs at exit."""
        self._portal.close()
