"""When faults are injected."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from timebell_torture import injectors
from timebell_torture import nemesis as module
from timebell_torture.nemesis import Nemesis
from timebell_torture.plan import Plan

MAX_SECONDS, FAULTED_SECONDS = 6.3, 7.0


def test_a_fault_that_waited_for_another_does_not_start_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(
        out=str(tmp_path), sockets="", seed=1, minutes=1, rate=1, store="mariadb", nodes=["n1", "n2"],
        faults=["rewind"],
    )  # fmt: skip
    plan.start_phases()
    plan.phases = {"faulted": (0.0, FAULTED_SECONDS)}
    started_at: list[float] = []

    async def rewind(nemesis: Nemesis, _: str) -> None:
        started_at.append(nemesis.plan.elapsed)
        while nemesis.plan.elapsed + MAX_SECONDS < FAULTED_SECONDS:
            await asyncio.sleep(0.01)

    async def body() -> None:
        nemesis = Nemesis(plan)
        nemesis.nodes = dict.fromkeys(plan.nodes)  # type: ignore[assignment]
        await nemesis.inject_faults()

    monkeypatch.setitem(injectors.INJECTORS, "rewind", rewind)
    monkeypatch.setitem(module.MAX_FAULT_SECONDS, "rewind", MAX_SECONDS)
    asyncio.run(body())
    assert started_at
    assert max(started_at) + MAX_SECONDS < FAULTED_SECONDS
