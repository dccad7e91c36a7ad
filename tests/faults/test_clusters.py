"""Failovers of real clusters under load, judged from outside; see `python -m benchmarks patroni` and `galera`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clusters import galera, patroni
from benchmarks.clusters.judge import Result, judge
from benchmarks.clusters.member import Missing
from timebell.cli.doctor.galera import check_galera
from timebell.clock import system_now
from timebell.errors import StoreUnreachable
from timebell.store.open import open_store

MAX_FIRST_START_SECONDS = 5.0  # after the database accepts writes again
MAX_LAST_START_SECONDS = 21.0  # the reply to a claim may be lost: another node then takes the job over


def assert_nothing_was_lost(result: Result) -> None:
    result.print()
    assert result.acknowledged > 1000
    assert result.lost == [], result.log
    assert result.early == []
    assert result.unexplained == 0, result.log
    for outcome in result.outcomes:
        assert outcome.first_start is not None
        assert outcome.first_start < MAX_FIRST_START_SECONDS, outcome
        assert (outcome.last_due_started or 0) < MAX_LAST_START_SECONDS, outcome


def judge_events(cluster: type[Any], events: Mapping[str, Callable[[Any], None]], names: Sequence[str]) -> Result:
    """Judge these events on a cluster; skip the test if a program is missing."""
    try:
        return judge(cluster, [(name, events[name]) for name in names])
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.soak
def test_ten_failovers_of_patroni_lose_and_repeat_nothing() -> None:
    assert_nothing_was_lost(judge_events(patroni.PatroniCluster, patroni.EVENTS, patroni.TEN_EVENTS))


@pytest.mark.soak
def test_ten_failures_of_the_writer_of_a_galera_cluster_lose_and_repeat_nothing() -> None:
    assert_nothing_was_lost(judge_events(galera.GaleraCluster, galera.EVENTS, galera.TEN_EVENTS))


@pytest.mark.soak
def test_failures_of_one_of_several_writers_of_a_galera_cluster_lose_and_repeat_nothing() -> None:
    assert_nothing_was_lost(judge_events(galera.ClusterWithSeveralWriters, galera.EVENTS, tuple(galera.EVENTS)))


@pytest.mark.soak
def test_several_writers_of_a_galera_cluster_are_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    try:
        cluster = galera.ClusterWithSeveralWriters(tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))

    async def check() -> None:
        first, second = (open_store(url, system_now) for url in cluster.node_urls)
        doctor = open_store(second.url, system_now)
        await first.read_clock()
        assert [each.verdict for each in await check_galera(doctor)] == ["ok"]
        await second.read_clock()
        assert [each.code for each in await check_galera(doctor)] == ["GALERA_SEVERAL_WRITERS"]
        for store in (first, second, doctor):
            await store.close()

    try:
        cluster.start()
        asyncio.run(check())
    finally:
        cluster.stop()


@pytest.mark.soak
def test_a_member_of_galera_without_its_cluster_is_unavailable(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    try:
        cluster = galera.GaleraCluster(tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))

    async def check() -> None:
        store = open_store(cluster.url, system_now)
        await store.read_clock()
        for name in galera.MEMBER_NAMES[1:]:
            await asyncio.to_thread(cluster.members[name].kill)
        codes: dict[int, str] = {}
        async with asyncio.timeout(MAX_LAST_START_SECONDS):
            while 1047 not in codes:
                try:
                    await store.read_clock()
                except StoreUnreachable as error:
                    cause: Any = error.__cause__
                    codes[cause.orig.args[0]] = error.code
        assert codes[1047] == "DATABASE_RESTARTING"
        await store.close()

    try:
        cluster.start()
        asyncio.run(check())
    finally:
        cluster.stop()
