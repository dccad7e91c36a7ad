"""The completer writes endings in batches: all that came while the last batch was written.

It waits for no timer, so a lone ending is written at once and a flood in a few statements. What the store
cannot take now is kept until it can; the fence then decides whether it still counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from timebell.engine.context import Node
from timebell.errors import StoreError
from timebell.model.job import Ending, JobState
from timebell.store.sql import jobs, reports, turns
from timebell.store.sql.told import end_told

log = logging.getLogger("timebell.completer")

MOST = 1000


class Completer:
    """The service; `put` is called by whoever ended an attempt, `step` writes one batch."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._waiting: list[Ending] = []
        self._arrived: asyncio.Future[None] | None = None

    def put(self, ending: Ending) -> None:
        """Take an ending over; the attempt stays held until it is written."""
        self._waiting.append(ending)
        if self._arrived is not None:
            if not self._arrived.done():
                self._arrived.set_result(None)
            self._arrived = None

    @property
    def empty(self) -> bool:
        """Whether everything put so far is written."""
        return not self._waiting

    async def wait(self) -> None:
        """Until there is something to write. For one who waits."""
        if not self._waiting:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived

    async def step(self) -> None:
        """Write one batch. On a StoreError it stays, to be written again."""
        batch = self._waiting[:MOST]
        if not batch:
            return
        try:
            await self.write(batch)
        except StoreError:
            raise
        except Exception:
            await self._write_singly(batch)
        del self._waiting[: len(batch)]
        for ending in batch:
            self.node.let_go(ending.id, ending.attempt)
        self.node.counters.ended += len(batch)
        if self.node.limited:
            self.node.working.poke()  # a tenant may have room for another

    async def _write_singly(self, batch: list[Ending]) -> None:
        """Write a batch that the store refused, without the ending that it is for: that attempt's lease runs out."""
        for ending in batch:
            try:
                await self.write([ending])
            except StoreError:
                raise
            except Exception:
                log.exception("what came of job %s cannot be written", ending.id)

    async def write(self, batch: list[Ending]) -> None:
        """Write endings, whoever they come from; those with an old fence change nothing."""
        store = self.node.store
        again, handed, final = _by_state(batch)
        if handed:
            out = await store.hot(jobs.dispatch, handed)
            for ending in handed:
                if ending.id not in out and ending.errors is not None:  # its receiver has reported by now: as it said
                    await store.run(reports.record, ending)
        if again:
            grouped = [ending for ending in again if ending.grouped is not None]
            lone = [ending for ending in again if ending.grouped is None]
            kept = await store.hot(jobs.retry, lone) if lone else set()
            if grouped:
                kept |= await store.run(turns.retry_in_group, grouped)
            # Not back to pending: its cancel was asked meanwhile (then it ends here), or the fence is old.
            final += [
                dataclasses.replace(ending, state=JobState.CANCELLED) for ending in again if ending.id not in kept
            ]
            self.node.working.poke()  # it learns when they are due
        told, plain, in_turn = _by_way(final)
        written: set[str] = set()
        if plain:
            ended = await (store.hot if store.dialect.delete_in_cte else store.run)(jobs.end, plain)
            written |= {str(row["id"]) for row in ended}
            if any(row["serial"] for row in ended):
                self._turned(await store.run(turns.hand_on, ended, plain))
        if in_turn:
            schedules = [ending.schedule_id for ending in in_turn if ending.schedule_id]
            written |= self._turned(await store.run(turns.end_in_turn, in_turn, schedules))
        if told:
            written |= self._turned(await store.run(end_told, told))
            self.node.working.poke()
        if len(written) < len(final) and (stale := [ending.id for ending in final if ending.id not in written]):
            self.node.counters.fenced += len(stale)
            log.warning("%d endings came too late and changed nothing: %s", len(stale), ", ".join(stale[:5]))

    def _turned(self, ended: turns.Ended) -> set[str]:
        """Wake those for whom there is something to do now; the ids whose fence held."""
        if ended.let_go:
            self.node.working.poke()
        if ended.put_off:
            self.node.planning.poke()
        return ended.ids


def _by_state(batch: list[Ending]) -> tuple[list[Ending], list[Ending], list[Ending]]:
    """Those that are tried again, are handed over, and are over."""
    again: list[Ending] = []
    handed: list[Ending] = []
    final: list[Ending] = []
    for ending in batch:
        if ending.state is JobState.PENDING:
            again.append(ending)
        elif ending.state is JobState.DISPATCHED:
            handed.append(ending)
        else:
            final.append(ending)
    return again, handed, final


def _by_way(final: list[Ending]) -> tuple[list[Ending], list[Ending], list[Ending]]:
    """Those that somebody is told of, those on their own, and those that take turns."""
    told: list[Ending] = []
    plain: list[Ending] = []
    in_turn: list[Ending] = []
    for ending in final:
        if ending.state is JobState.FAILED or ending.watched:
            told.append(ending)
        elif ending.schedule_id is None and ending.grouped is None:
            plain.append(ending)
        else:
            in_turn.append(ending)
    return told, plain, in_turn
