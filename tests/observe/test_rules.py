"""The alert rules: promtool tests each rule, and a real Prometheus scrapes a node.

A missing Prometheus is installed from the Debian package if the tests run as root; otherwise its tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import timebell.observe
from tests.debian_packages import install
from tests.servers import free_port
from tests.unit.cli.conftest import Cli, Start, cli, start
from tests.unit.cli.process import until
from timebell.features import FEATURES
from timebell.observe.metrics import collect_definitions

__all__ = ["cli", "start"]

# Counters without a series on a healthy node, because their events have not happened.
RARE = ("timebell_fires_not_run_total", "timebell_missed_total")

DASHBOARD = Path(timebell.observe.__file__).with_name("grafana.json")
RULES = Path(timebell.observe.__file__).with_name("rules.yml")
HEALTHY = Path(__file__).with_name("rules_test.yml")
# For each rule: the input series that make it fire, and the time by which it fires.
FIRING: dict[str, tuple[list[tuple[str, str]], str]] = {
    "TimebellNotFired": ([("timebell_schedule_overdue", "0x4 1x10")], "2m"),
    "TimebellDown": ([('up{job="timebell"}', "1x4 0x10")], "2m"),
    "TimebellDatabaseDown": ([("timebell_database_up", "1x4 0x10")], "2m"),
    "TimebellEvaluationLagHigh": ([("timebell_evaluation_lag_seconds", "31x10")], "1m"),
    "TimebellFireLagHigh": (
        [('timebell_fire_lag_seconds_bucket{le="15"}', "0+10x60"),
         ('timebell_fire_lag_seconds_bucket{le="60"}', "0+98x60"),
         ('timebell_fire_lag_seconds_bucket{le="+Inf"}', "0+100x60")], "12m"),
    "TimebellMissed": ([("timebell_missed_last_hour", "1x4")], "15s"),
    "TimebellDuplicateFire": ([("timebell_double_fires_total", "1x10")], "1m"),
    "TimebellAuditDifference": ([('timebell_audit_differences_total{finding="early"}', "0x10 1x30")], "8m"),
    "TimebellFailureRateHigh": (
        [('timebell_fires_total{outcome="ok"}', "0+89x60"),
         ('timebell_fires_total{outcome="dead"}', "0+11x60")], "12m"),
    "TimebellAuthenticationFailures": (
        [('timebell_auth_failures_total{reason="wrong_key"}', "0+20x30")], "10m"),
    "TimebellAuditExportFailing": (
        [('timebell_audit_export_failing_seconds{destination="syslog"}', "0+15x60")], "8m"),
    "TimebellNoLeader": ([("timebell_leader", "0x10")], "2m"),
    "TimebellLeaderFlapping": ([("timebell_leader_changes_total", "0+1x60")], "5m"),
    "TimebellClockSkew": ([('timebell_node_clock_skew_seconds{instance="a"}', "-0.6x20")], "3m"),
    "TimebellRunNearTimeout": (
        [('timebell_run_timeout_ratio_bucket{topic="t",le="0.9"}', "0+90x100"),
         ('timebell_run_timeout_ratio_bucket{topic="t",le="0.95"}', "0+99x100"),
         ('timebell_run_timeout_ratio_bucket{topic="t",le="+Inf"}', "0+100x100")], "20m"),
    "TimebellBacklogGrowing": ([('timebell_queue_depth{queue="mail"}', "501x40")], "5m"),
    "TimebellDeadLettersGrowing": ([("timebell_dead_letters_last_hour", "1x4")], "15s"),
    "TimebellUnhandledJobs": ([("timebell_unhandled_jobs", "1x20")], "3m"),
    "TimebellSchedulesErrored": ([('timebell_schedules{state="errored"}', "1x20")], "1m"),
    "TimebellTzdataMismatch": (
        [('timebell_build_info{tzdata="2026a"}', "1x80"), ('timebell_build_info{tzdata="2026b"}', "1x80")], "15m"),
}  # fmt: skip


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@cache
def tool(name: str) -> str:
    """Return the path of Prometheus or promtool; install the package if necessary and permitted."""
    if shutil.which(name) is None:
        install("prometheus")
    found = shutil.which(name)
    assert found is not None
    return found


def promtool(folder: Path, tests: Any) -> None:
    shutil.copy(RULES, folder / "rules.yml")
    (folder / "test.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_use_existing_metrics() -> None:
    known = {name + end for name in collect_definitions(FEATURES) for end in ("", "_bucket")}
    named = {word for rule in rules() for word in re.findall(r"timebell_\w+", rule["expr"])}
    assert named <= known
    assert {rule["alert"] for rule in rules()} == set(FIRING)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules())


def expressions() -> list[str]:
    """Return the queries of the Grafana panels."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_the_grafana_dashboard_uses_existing_metrics() -> None:
    known = {
        name + end
        for name, about in collect_definitions(FEATURES).items()
        for end in ("", "_bucket")
        if not end or about[0][0] == "h"
    }
    named = {word for expression in expressions() for word in re.findall(r"timebell_\w+", expression)}
    assert named <= known
    assert len(named) > 20
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert not [one for one in panels if one["gridPos"]["x"] + one["gridPos"]["w"] > 24]


@pytest.mark.parametrize(("which", "file"), [("rules", RULES), ("grafana", DASHBOARD)])
def test_rules_and_dashboard_are_printed_unchanged(which: str, file: Path, cli: Cli) -> None:
    assert cli("observe", which).out == file.read_text().rstrip("\n") + "\n"


def test_a_healthy_system_fires_no_alert(tmp_path: Path) -> None:
    promtool(tmp_path, yaml.safe_load(HEALTHY.read_text()))


def test_each_rule_fires_above_its_threshold(tmp_path: Path) -> None:
    tests = [
        {
            "interval": "15s",
            "input_series": [{"series": series, "values": values} for series, values in inputs],
            "promql_expr_test": [
                {
                    "expr": f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                    "eval_time": at,
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}],
                }
            ],
        }
        for alert, (inputs, at) in FIRING.items()
    ]
    promtool(tmp_path, {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": tests})


def test_a_real_prometheus_scrapes_a_node_and_loads_the_rules(start: Start, tmp_path: Path) -> None:
    prometheus = tool("prometheus")
    port, own = free_port(), free_port()
    node = start("dev", "--port", port)
    node.wait_for("Ready in", err=True)
    shutil.copy(RULES, tmp_path / "rules.yml")
    scrape = {"job_name": "timebell", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml"],
        "scrape_configs": [scrape],
    }  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address=127.0.0.1:{own}"],
            cwd=tmp_path, stdout=log, stderr=log,
        )  # fmt: skip

    def ask(path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{own}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def fires() -> float | None:
        found = ask("query", query='sum(timebell_fires_total{outcome="ok"})')
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def answered(query_text: str, least: int) -> bool | None:
        found = ask("query", query=query_text)
        return True if found is not None and len(found["result"]) >= least else None

    try:
        assert until(fires, (tmp_path / "prometheus.log").read_text) >= 1
        log_of = (tmp_path / "prometheus.log").read_text
        (group,) = until(lambda: ask("rules"), log_of)["groups"]
        assert {rule["name"] for rule in group["rules"]} == set(FIRING)
        for expression in expressions():  # rates need two samples; rare counters may have none
            query_text = expression.replace("$__rate_interval", "1m")
            rare = any(metric in query_text for metric in RARE)
            until(lambda: answered(query_text, least=0 if rare else 1), lambda: query_text)

        def up() -> bool | None:  # a scrape has a second, which a busy machine may exceed
            (target,) = (ask("targets") or {}).get("activeTargets", [{}])
            return (target.get("health"), target.get("lastError")) == ("up", "") or None

        until(up, log_of)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


NIGHTLY_APP = """
from timebell import Timebell
app = Timebell()

@app.schedule("nightly-billing", cron="0 0 1 1 *", timezone="UTC", retry={"attempts": 1})
async def bill(event):
    raise ConnectionError("bank is away")
"""


@pytest.mark.slow
def test_one_failed_nightly_job_raises_the_alert_within_two_evaluations(start: Start, tmp_path: Path) -> None:
    prometheus, port, own = tool("prometheus"), free_port(), free_port()
    (tmp_path / "nightly.py").write_text(NIGHTLY_APP)
    node = start("dev", "nightly.py", "--port", port, "--no-reload")
    node.wait_for("Ready in", err=True)
    shutil.copy(RULES, tmp_path / "rules.yml")
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "timebell", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]},
        ],
    }  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    process = subprocess.Popen(
        [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data",
         f"--web.listen-address=127.0.0.1:{own}"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def query(expression: str) -> list[tuple[float, float]] | None:
        """Return the samples of the only series as (time, value), or None without a series."""
        url = f"http://127.0.0.1:{own}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            return None
        return [(float(at), float(value)) for at, value in result[0]["values"]] if result else None

    try:
        until(lambda: query("timebell_dead_letters_last_hour[5m]"), lambda: "Prometheus scrapes the node")
        assert query('ALERTS{alertname="TimebellDeadLettersGrowing"}[5m]') is None
        trigger = start("schedule", "trigger", "nightly-billing", TIMEBELL_URL=f"http://127.0.0.1:{port}")
        assert trigger.wait() == 0
        raised = until(
            lambda: query('ALERTS{alertname="TimebellDeadLettersGrowing",alertstate="firing"}[5m]'), lambda: "alert"
        )
        samples = query("timebell_dead_letters_last_hour[5m]") or []
        first_seen = min(at for at, value in samples if value)
        assert raised[0][0] - first_seen <= 2.0  # two evaluations
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
