"""`python -m benchmarks [W1,W2,...,next,verbs] [options]`: run the workloads and print them beside those of peers.

`python -m benchmarks table` stores its results and writes docs/performance.md. Other commands: `profile` attributes the
CPU time of a job to its steps, `http` measures the API, `pages` the dashboard, `forecast` the forecast, `failover`
outages of the database, `patroni` and `galera` failovers of clusters, `targets` external queues, `push` sending push
messages, `campaigns` campaigns to many devices, `plans` the plans of statements with ten million rows, `soak` a long
run, `pinned` a snapshot that is held open, and `nodes` simulates more nodes than this machine can run.
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
from benchmarks.systems import BenchmarkedSystem, Server, TimebellOnPostgres, TimebellOnSqlite
from benchmarks.workloads import SCALES, WORKLOADS, Sizes

Cell = dict[str, Any]


def _parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    all_workloads = [*WORKLOADS, "next", "verbs"]
    parser.add_argument(
        "workloads", nargs="?", default=all_workloads, type=report.subset_of(all_workloads), metavar="W1,W2,..."
    )
    stores = ["sqlite", "postgres", "mariadb"]
    parser.add_argument("--stores", default=stores[:2], type=report.subset_of(stores))
    parser.add_argument(
        "--processes",
        default=["1", "2"],
        type=report.subset_of(["1", "2"]),
        help="worker processes; two only on a server",
    )
    parser.add_argument("--peers", default=["pgqueuer"], type=_peers, metavar="P1,P2,...", help="all, none or a list")
    parser.add_argument("--scale", default="full", choices=[*SCALES])
    parser.add_argument("--runs", default=1, type=int, help="runs of each cell; the output has medians")
    parser.add_argument("--backlog", type=int, help="pending jobs in W4, for example 10000000")
    parser.add_argument("--json", metavar="FILE", help="also write every run to this file")
    return parser.parse_args(argv)


def _peers(text: str) -> list[str]:
    return {"all": list(PEERS), "none": []}.get(text) or (report.subset_of(list(PEERS))(text) if text != "none" else [])


def _plan_runs(args: argparse.Namespace, server: Server | None) -> list[tuple[str, BenchmarkedSystem, int]]:
    """Return (workload, system, processes) in order; peers follow Timebell directly, to see the same machine state."""
    counts = [int(each) for each in args.processes]
    plan: list[tuple[str, BenchmarkedSystem, int]] = []
    for workload in (each for each in args.workloads if each in WORKLOADS):
        if "sqlite" in args.stores and 1 in counts:
            plan.append((workload, TimebellOnSqlite(), 1))
        if server is not None:
            systems: list[BenchmarkedSystem] = [TimebellOnPostgres(server)]
            systems += [PEERS[peer](server) for peer in args.peers]
            plan += [
                (workload, system, count)
                for count in counts for system in systems
                if workload in system.workloads and (count == 1 or system.sees_new_jobs)
            ]  # fmt: skip
        if "mariadb" in args.stores:
            from benchmarks.on_mariadb import TimebellOnMariadb  # requires packages of the tests

            plan += [(workload, TimebellOnMariadb(), count) for count in counts]
    return plan


async def _measure(args: argparse.Namespace, sizes: Sizes, cells: list[Cell], server: Server | None) -> None:
    """Append results to `cells`, which are printed even if the run is interrupted."""
    plan = _plan_runs(args, server)
    for run in range(args.runs):
        for at, (workload, system, count) in enumerate(plan):
            label = f"{workload} {system.name} on {system.store}, {count} process(es)"
            _log(f"[{run * len(plan) + at + 1}/{args.runs * len(plan)}] {label}")
            begin = time.monotonic()
            try:
                async with system:
                    figures = await WORKLOADS[workload](system, count, sizes)
            except Exception as error:  # continue with the other cells
                figures = {"error": f"{type(error).__name__}: {error}"[:200]}
            _log(f"    {time.monotonic() - begin:.0f} s  {figures.get('error') or _summarize(figures)}")
            key = {"workload": workload, "system": system.name, "store": system.store, "processes": count}
            cell = next((each for each in cells if key.items() <= each.items()), None)
            if cell is None:
                cells.append(cell := {**key, "runs": []})
            cell["runs"].append(figures)
            cell["median"] = report.medians(cell["runs"])


def _summarize(figures: dict[str, Any]) -> str:
    names = (
        "jobs_s",
        "worker_us",
        "lag_p50_ms",
        "lag_p99_ms",
        "durable_s",
        "idle_server_cpu_s",
        "lost",
        "dup",
        "early",
    )
    return ", ".join(f"{name} {report.format_number(figures[name])}" for name in names if name in figures)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_results(args: argparse.Namespace, results: dict[str, Any]) -> None:
    print(report.format_machine(results["machine"], results["postgres"]))
    for workload in WORKLOADS:
        if cells := [cell for cell in results["cells"] if cell["workload"] == workload]:
            print(f"\n{report.workload_table(workload, cells)}")
    if results["next"]:
        print(f"\n{report.next_table(results['next'])}")
    if results["verbs"]:
        print(f"\n{report.verbs_table(results['verbs'])}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


async def _main(args: argparse.Namespace) -> bool:
    sizes = SCALES[args.scale]
    if args.backlog is not None:
        sizes = replace(sizes, backlog=args.backlog)
    has_workloads = any(each in WORKLOADS for each in args.workloads)
    on_server = "postgres" in args.stores and (has_workloads or "verbs" in args.workloads)
    if on_server and has_workloads and (missing := prepare(args.peers)):
        reasons = "; ".join(f"{name}: {error}" for name, error in missing.items())
        raise SystemExit(f"Peers are missing: {reasons}. Install requirements/bench.txt, or use --peers none.")
    results: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "scale": asdict(sizes), "runs": args.runs,
        "machine": machine.describe(), "postgres": {}, "cells": [], "next": [], "verbs": [],
    }  # fmt: skip
    server = Server() if on_server else None
    try:
        if server is not None:
            await server.start()
            results["postgres"] = {"version": server.version, **server.settings}
        await _measure(args, sizes, results["cells"], server)
        if "next" in args.workloads:
            from benchmarks import next_fire  # requires croniter and cronsim

            _log("next-fire evaluations")
            results["next"] = next_fire.measure()
        if "verbs" in args.workloads:
            _log("verbs")
            stores = [store for store in args.stores if store != "mariadb"]
            results["verbs"] = await verbs.measure(stores, server)
    except asyncio.CancelledError:
        _log("interrupted; results so far:")
        raise
    finally:
        if server is not None:
            await server.close()
        _print_results(args, results)
    return all(_is_valid(cell["median"]) for cell in results["cells"])


def _is_valid(figures: dict[str, Any]) -> bool:
    """Return whether every job ran exactly once and was created before it was due."""
    return not any(figures.get(name) for name in (*report.SUMMED_FIGURES, "created_late", "error"))


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["table"]:
            from benchmarks import table  # requires the packages of the peers

            sys.exit(table.main(sys.argv[2:]))
        if sys.argv[1:2] == ["profile"]:
            from benchmarks import job_profile

            sys.exit(job_profile.main(sys.argv[2:]))
        if sys.argv[1:2] == ["http"]:
            sys.exit(over_http.main(sys.argv[2:]))
        if sys.argv[1:2] == ["remote"]:
            from benchmarks import remote

            sys.exit(remote.main(sys.argv[2:]))
        if sys.argv[1:2] == ["pages"]:
            sys.exit(pages.main(sys.argv[2:]))
        if sys.argv[1:2] == ["forecast"]:
            from benchmarks import forecast

            sys.exit(forecast.main(sys.argv[2:]))
        if sys.argv[1:2] == ["targets"]:
            sys.exit(to_targets.main(sys.argv[2:]))
        if sys.argv[1:2] == ["plans"]:
            from benchmarks import plans  # requires packages of the tests

            sys.exit(plans.main(sys.argv[2:]))
        if sys.argv[1:2] == ["nodes"]:
            from benchmarks import nodes

            sys.exit(nodes.main())
        if sys.argv[1:2] in (["soak"], ["pinned"]):
            from benchmarks import steady

            sys.exit((steady.soak if sys.argv[1] == "soak" else steady.pinned)(sys.argv[2:]))
        if sys.argv[1:2] == ["failover"]:
            from benchmarks.failover import measure

            sys.exit(measure.main(sys.argv[2:]))
        if sys.argv[1:2] in (["patroni"], ["galera"]):
            from benchmarks.clusters import galera, patroni

            sys.exit((patroni if sys.argv[1] == "patroni" else galera).main(sys.argv[2:]))
        if sys.argv[1:2] == ["campaigns"]:
            from benchmarks import campaigns

            sys.exit(campaigns.main(sys.argv[2:]))
        if sys.argv[1:2] == ["push"]:
            from benchmarks import push  # requires an optional dependency

            sys.exit(push.main(sys.argv[2:]))
        sys.exit(0 if asyncio.run(_main(_parse_arguments())) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
