"""The completer writes endings in batches: all that came while the last batch was written.

It waits for no timer, so a lone ending is written at once and a flood in a few statements. What the store
cannot take now is kept until it can; the fence then decides whether it still counts. It waits for nobody's locks
either, as the node that has them may stand still: what is locked is left out, and written a little later.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection

from timebell.engine.node import Node
from timebell.errors import StoreError
from timebell.model.job import Ending, JobState
from timebell.store.jobs import complete, external_reports, serial
from timebell.store.jobs.outcome_notices import end_told

log = logging.getLogger("timebell.completer")

MOST = 1000
SHORTEST, LONGEST = 0.02, 0.3  # seconds until what was locked is tried again, doubled each time


class Completer:
    """The service; `put` is called by whoever ended an attempt, `step` writes one batch."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._waiting: list[Ending] = []
        self._locked: list[Ending] = []
        self._pause = SHORTEST
        self._arrived: asyncio.Future[None] | None = None

    @property
    def skip(self) -> bool:
        """Whether rows can be locked one by one, so that those that are can be left out."""
        return bool(self.node.store.dialect.words["skip_locked"])

    def put(self, *endings: Ending) -> None:
        """Take endings over; the attempts stay held until they are written."""
        self._waiting += endings
        if self._arrived is not None:
            if not self._arrived.done():
                self._arrived.set_result(None)
            self._arrived = None

    @property
    def empty(self) -> bool:
        """Whether everything put so far is written."""
        return not self._waiting and not self._locked

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
            locked = await self.write(batch)
        except StoreError:
            raise
        except Exception:
            locked = await self._write_singly(batch)
        del self._waiting[: len(batch)]
        left = {(ending.id, ending.attempt) for ending in locked}
        written = [ending for ending in batch if (ending.id, ending.attempt) not in left] if left else batch
        self.node.let_all_go(written)
        self.node.counters.ended += len(written)
        if self.node.limited:
            self.node.working.poke()  # a tenant may have room for another
        if locked:
            self._put_off(locked)
        elif not self._locked:
            self._pause = SHORTEST

    def _put_off(self, locked: list[Ending]) -> None:
        """Write them a little later: whoever has locked their rows is done by then, or the store ends it."""
        if not self._locked:
            asyncio.get_running_loop().call_later(self._pause, self._resume)
            self._pause = min(2 * self._pause, LONGEST)
        self._locked += locked

    def _resume(self) -> None:
        locked, self._locked = self._locked, []
        self.put(*locked)

    async def _write_singly(self, batch: list[Ending]) -> list[Ending]:
        """Write a batch that the store refused, without the ending that it is for: that attempt's lease runs out."""
        locked = []
        for ending in batch:
            try:
                locked += await self.write([ending])
            except StoreError:
                raise
            except Exception:
                log.exception("what came of job %s cannot be written", ending.id)
        return locked

    async def write(self, batch: list[Ending]) -> list[Ending]:
        """Write endings, whoever they come from; those with an old fence change nothing. Those that were not written,
        as another transaction has locked what they change: they are to be written again."""
        store, skip = self.node.store, self.skip
        again, handed, final = _by_state(batch)
        locked: set[str] = set()
        if handed:
            out = await store.hot(complete.dispatch, handed, skip=skip)
            left = [ending for ending in handed if ending.id not in out]
            locked |= (await self._still(left)).keys()
            for ending in left:
                if ending.id not in locked and ending.errors is not None:  # its receiver has reported: as it said
                    await store.run(external_reports.record, ending)
        if again:
            grouped = [ending for ending in again if ending.grouped is not None]
            lone = [ending for ending in again if ending.grouped is None]
            kept = await store.hot(complete.retry, lone, skip=skip) if lone else set()
            if grouped:
                kept |= await store.run(serial.retry_in_group, grouped)
            left = [ending for ending in again if ending.id not in kept]
            locked |= {id_ for id_, asked in (await self._still(left)).items() if not asked}
            # Not back to pending: its cancel was asked meanwhile (then it ends here), or the fence is old.
            final += [
                dataclasses.replace(ending, state=JobState.CANCELLED) for ending in left if ending.id not in locked
            ]
            self.node.working.poke()  # it learns when they are due
        told, plain, in_turn = _by_way(final)
        written: set[str] = set()
        if plain:
            ended = await (store.hot if store.dialect.delete_in_cte else store.run)(complete.end, plain, skip=skip)
            whole = len(ended) == len(plain)  # as almost always
            written |= {one.id for one in plain} if whole else {str(row["id"]) for row in ended}
            if any(row["serial"] for row in ended):
                self._turned(await store.run(serial.hand_on, ended, plain))
        if in_turn:
            schedules = [ending.schedule_id for ending in in_turn if ending.schedule_id]
            written |= self._turned(await store.run(serial.end_in_turn, in_turn, schedules, skip=skip))
        if told:
            written |= self._turned(await store.run(end_told, told, skip=skip))
            self.node.working.poke()
        if len(written) < len(final):
            left = [ending for ending in final if ending.id not in written]
            locked |= (await self._still(left)).keys()
            self._came_too_late([ending.id for ending in left if ending.id not in locked])
        return [ending for ending in batch if ending.id in locked] if locked else []

    async def _still(self, left: Collection[Ending]) -> dict[str, bool]:
        """Of what was not written the ids whose fence holds, and whether their cancel was asked."""
        if not left or not self.skip:
            return {}
        return await self.node.store.hot(complete.still, [(ending.id, ending.attempt, ending.was) for ending in left])

    def _came_too_late(self, stale: list[str]) -> None:
        if stale:
            self.node.counters.fenced += len(stale)
            log.warning("%d endings came too late and changed nothing: %s", len(stale), ", ".join(stale[:5]))

    def _turned(self, ended: serial.Ended) -> set[str]:
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
