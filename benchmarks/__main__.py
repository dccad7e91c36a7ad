"""`python -m benchmarks [W1,W2,...,next,verbs] [options]`: runs the workloads and prints them beside the peer's.

`python -m benchmarks table` keeps what it measures and writes docs/performance.md. Others measure something else:
`http` the API, `pages` the dashboard, `targets` the outside queues, `push` the sending of push messages, `campaigns`
campaigns to many devices, `plans` ten million rows, `soak` a long time, `pinned` a snapshot that stays,
`nodes` (a simulation) more nodes than there is room for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import machine, over_http, pages, report, to_targets, verbs
from benchmarks.peers.systems import PEERS, prepare
from benchmarks.systems import Measured, Server, TimebellOnPostgres, TimebellOnSqlite
from benchmarks.workloads import SCALES, WORKLOADS, Sizes

Cell = dict[str, Any]


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    everything = [*WORKLOADS, "next", "verbs"]
    parser.add_argument(
        "workloads", nargs="?", default=everything, type=report.some_of(everything), metavar="W1,W2,..."
    )
    stores = ["sqlite", "postgres", "mariadb"]
    parser.add_argument("--stores", default=stores[:2], type=report.some_of(stores))
    parser.add_argument("--processes", default=["1", "2"], type=report.some_of(["1", "2"]), help="two only on a server")
    parser.add_argument(
        "--peers", default=["pgqueuer"], type=_peers, metavar="P1,P2,...", help="all, none or some of them"
    )
    parser.add_argument("--scale", default="full", choices=[*SCALES])
    parser.add_argument("--runs", default=1, type=int, help="of each; medians are shown")
    parser.add_argument("--backlog", type=int, help="pending jobs in W4, for instance 10000000")
    parser.add_argument("--json", metavar="FILE", help="also write every run there")
    return parser.parse_args(given)


def _peers(text: str) -> list[str]:
    return {"all": list(PEERS), "none": []}.get(text) or (report.some_of(list(PEERS))(text) if text != "none" else [])


def _planned(given: argparse.Namespace, server: Server | None) -> list[tuple[str, Measured, int]]:
    """(workload, system, processes), the peers right after ours so that all see the same machine."""
    counts = [int(each) for each in given.processes]
    plan: list[tuple[str, Measured, int]] = []
    for workload in (each for each in given.workloads if each in WORKLOADS):
        if "sqlite" in given.stores and 1 in counts:
            plan.append((workload, TimebellOnSqlite(), 1))
        if server is not None:
            systems: list[Measured] = [TimebellOnPostgres(server)]
            if workload != "W7":  # they know no tenants
                systems += [PEERS[peer](server) for peer in given.peers]
            plan += [
                (workload, system, count)
                for count in counts for system in systems
                if system.most.get(workload) != 0 and (count == 1 or system.notices)
            ]  # fmt: skip
        if "mariadb" in given.stores:
            from benchmarks.on_mariadb import TimebellOnMariadb  # needs what the tests need

            plan += [(workload, TimebellOnMariadb(), count) for count in counts]
    return plan


async def _measure(given: argparse.Namespace, sizes: Sizes, cells: list[Cell], server: Server | None) -> None:
    """Fill `cells`; what is there when something stops it is worth showing."""
    plan = _planned(given, server)
    for run in range(given.runs):
        for at, (workload, system, count) in enumerate(plan):
            label = f"{workload} {system.name} on {system.store}, {count} process(es)"
            _say(f"[{run * len(plan) + at + 1}/{given.runs * len(plan)}] {label}")
            begin = time.monotonic()
            try:
                async with system:
                    figures = await WORKLOADS[workload](system, count, sizes)
            except Exception as failed:  # one that fails must not cost us the others
                figures = {"error": f"{type(failed).__name__}: {failed}"[:200]}
            _say(f"    {time.monotonic() - begin:.0f} s  {figures.get('error') or _brief(figures)}")
            key = {"workload": workload, "system": system.name, "store": system.store, "processes": count}
            cell = next((each for each in cells if key.items() <= each.items()), None)
            if cell is None:
                cells.append(cell := {**key, "runs": []})
            cell["runs"].append(figures)
            cell["median"] = report.medians(cell["runs"])


def _brief(figures: dict[str, Any]) -> str:
    names = ("jobs_s", "lag_p50_ms", "lag_p99_ms", "durable_s", "idle_server_cpu_s", "lost", "dup", "early")
    return ", ".join(f"{name} {report.number(figures[name])}" for name in names if name in figures)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(given: argparse.Namespace, results: dict[str, Any]) -> None:
    print(report.facts(results["machine"], results["postgres"]))
    for workload in WORKLOADS:
        if cells := [cell for cell in results["cells"] if cell["workload"] == workload]:
            print(f"\n{report.workload_table(workload, cells)}")
    if results["next"]:
        print(f"\n{report.next_table(results['next'])}")
    if results["verbs"]:
        print(f"\n{report.verbs_table(results['verbs'])}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


async def _main(given: argparse.Namespace) -> bool:
    sizes = SCALES[given.scale]
    if given.backlog is not None:
        sizes = replace(sizes, backlog=given.backlog)
    loads = any(each in WORKLOADS for each in given.workloads)
    on_server = "postgres" in given.stores and (loads or "verbs" in given.workloads)
    if on_server and loads and (missing := prepare(given.peers)):
        why = "; ".join(f"{name}: {said}" for name, said in missing.items())
        raise SystemExit(f"Peers are not there: {why}. Install requirements/bench.txt, or say --peers none.")
    results: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "scale": asdict(sizes), "runs": given.runs,
        "machine": machine.facts(), "postgres": {}, "cells": [], "next": [], "verbs": [],
    }  # fmt: skip
    server = Server() if on_server else None
    try:
        if server is not None:
            await server.start()
            results["postgres"] = {"version": server.version, **server.settings}
        await _measure(given, sizes, results["cells"], server)
        if "next" in given.workloads:
            from benchmarks import next_fire  # needs croniter and cronsim

            _say("next-fire evaluations")
            results["next"] = next_fire.measure()
        if "verbs" in given.workloads:
            _say("verbs")
            stores = [store for store in given.stores if store != "mariadb"]
            results["verbs"] = await verbs.measure(stores, server)
    except asyncio.CancelledError:
        _say("stopped; what was measured so far:")
        raise
    finally:
        if server is not None:
            await server.close()
        _show(given, results)
    return all(_sound(cell["median"]) for cell in results["cells"])


def _sound(figures: dict[str, Any]) -> bool:
    """Whether every job ran once, in time to be measured."""
    return not any(figures.get(name) for name in (*report.SUMMED, "created_late", "error"))


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["table"]:
            from benchmarks import table  # needs the peers' packages

            sys.exit(table.main(sys.argv[2:]))
        if sys.argv[1:2] == ["http"]:
            sys.exit(over_http.main(sys.argv[2:]))
        if sys.argv[1:2] == ["pages"]:
            sys.exit(pages.main(sys.argv[2:]))
        if sys.argv[1:2] == ["targets"]:
            sys.exit(to_targets.main(sys.argv[2:]))
        if sys.argv[1:2] == ["plans"]:
            from benchmarks import plans  # needs what the tests need

            sys.exit(plans.main(sys.argv[2:]))
        if sys.argv[1:2] == ["nodes"]:
            from benchmarks import nodes

            sys.exit(nodes.main())
        if sys.argv[1:2] in (["soak"], ["pinned"]):
            from benchmarks import steady

            sys.exit((steady.soak if sys.argv[1] == "soak" else steady.pinned)(sys.argv[2:]))
        if sys.argv[1:2] == ["campaigns"]:
            from benchmarks import campaigns

            sys.exit(campaigns.main(sys.argv[2:]))
        if sys.argv[1:2] == ["push"]:
            from benchmarks import push  # needs the extra

            sys.exit(push.main(sys.argv[2:]))
        sys.exit(0 if asyncio.run(_main(_arguments())) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
