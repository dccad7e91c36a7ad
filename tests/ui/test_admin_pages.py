"""Pages for administrators: bulk actions on schedules, nodes and leaders, quotas of tenants, planned runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import event, insert

from tests.api.web import NIGHTLY
from timebell import Arrived
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.model.billing_months import billing_month, month_start
from timebell.model.routes import Routes
from timebell.store.audit import overview
from timebell.store.cluster import nodes
from timebell.store.schema import months
from timebell.store.transaction import Transaction

from .browser import Browser
from .test_job_pages import finished_job, insert_finished

Serve = Callable[..., Any]


async def test_bulk_actions_ask_for_confirmation_and_report_each_conflict(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        schedules = [
            (await browser.web.post("/api/v1/schedules", {**NIGHTLY, "name": f"many-{n}"})).json() for n in range(3)
        ]
        chosen = {f"one-{each['id']}": each["etag"] for each in schedules}
        action = "/ui/schedules/several"
        assert (await browser.submit("/ui/schedules", action, what="pause")).status_code == 400
        confirmation = await browser.submit("/ui/schedules", action, what="pause", **chosen)
        assert "Pause 3 schedules?" in confirmation.text
        assert "many-0, many-1, many-2" in confirmation.text
        assert all([(await _reload(browser, each))["enabled"] for each in schedules])
        await browser.submit("/ui/schedules", action, what="pause", sure="1", reason="night work", **chosen)
        assert [(await _reload(browser, each))["pauseReason"] for each in schedules] == ["night work"] * 3
        await browser.submit("/ui/schedules", action, what="resume", sure="1", **chosen)
        assert all([(await _reload(browser, each))["enabled"] for each in schedules])
        # One schedule was changed after the page was loaded: it stays, and its id is shown.
        path = f"/api/v1/schedules/{schedules[1]['id']}"
        await browser.web.ask("PATCH", path, {"timezone": "Europe/Paris"}, if_match="*")
        chosen = {f"one-{each['id']}": (await _reload(browser, each))["etag"] for each in schedules}
        chosen[f"one-{schedules[1]['id']}"] = schedules[1]["etag"]
        partial = await browser.submit("/ui/schedules", action, what="delete", sure="1", **chosen)
        assert "Deleted 2 of 3" in partial.text
        assert schedules[1]["id"] in partial.text
        assert [each["name"] for each in (await browser.web.get("/api/v1/schedules")).json()["items"]] == ["many-1"]
        await browser.create_user("vera", "viewer")
        await browser.sign_in("vera")
        assert "several" not in (await browser.get("/ui/schedules")).text


async def _reload(browser: Browser, schedule: dict[str, Any]) -> dict[str, Any]:
    return (await browser.web.get(f"/api/v1/schedules/{schedule['id']}")).json()  # type: ignore[no-any-return]


async def test_the_nodes_page_shows_load_and_past_leaders(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        app = browser.app
        await app.open()
        began = app.clock.now() - timedelta(hours=1)

        def lead(tx: Transaction) -> None:
            for n, (name, last_heartbeat) in enumerate((("alpha", 60), ("beta", 900))):
                routes, at = Routes(all_topics=True), began + timedelta(seconds=600 * n)
                id_ = new_id(at)
                heartbeat_at = began + timedelta(seconds=last_heartbeat)
                load = {"slots": 16, "running": 6 + n, "clock_ahead": 4}
                nodes.announce(tx, nodes.Node(id_, name, "1", "2026a", routes, 0, began, heartbeat_at, **load))
                assert nodes.acquire_lease(tx, id_, nodes.get_lease(tx), at) is not None
                if n:
                    nodes.remove_nodes(tx, [id_], began + timedelta(seconds=1200))

        await app.store.run(lead)
        text = re.sub(r"<[^>]+>", " ", (await browser.get("/ui/nodes")).text)
        for word in (
            "6 of 16 slots", "+4 ms", "beta acquired the lease", "No leader for 9 min", "alpha acquired the lease",
            "alpha stopped sending heartbeats", "beta stopped leading", "no leader since",
        ):  # fmt: skip
            assert word in text, word


async def test_the_nodes_page_shows_the_schedules_that_each_release_defines(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        app = browser.app

        @app.schedule("digest", cron="0 9 * * *", timezone="UTC")
        async def digest(event: Arrived) -> None: ...

        async with app.running() as service:
            await service.wait_until_idle()
            row = (await browser.get("/ui/nodes")).text.split('data-label="Schedules in code">')[1].split("</td>")[0]
            assert re.sub(r"<[^>]+>", " ", row).split() == ["digest", service.node.deployment.id]


async def test_the_tenants_page_shows_monthly_quotas(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        body = {"id": "acme", "limits": {"jobsPerMonth": 500}, "timezone": "Asia/Seoul"}
        assert (await browser.web.post("/api/v1/tenants", body)).status_code == 201
        await browser.web.post("/api/v1/tenants", {"id": "small", "limits": {"jobsPerMonth": 100}})
        now = browser.app.clock.now()
        usage = [{"tenant_id": "acme", "month": billing_month(now, "Asia/Seoul"), "used": 480},
                {"tenant_id": "small", "month": billing_month(now, None), "used": 100}]  # fmt: skip
        await browser.app.store.run(lambda tx: tx.execute(insert(months), usage))
        text = re.sub(r"<[^>]+>", " ", (await browser.get("/ui/tenants")).text)
        for word in ("480 of 500", "96 % used", "00:00 KST", "100 of 100", "Exhausted"):
            assert word in text, word
        # Only skips of this month because of the quota count.
        began = month_start(now, "Asia/Seoul")
        skips = ((began - timedelta(seconds=1), "quota"), (now, "quota"), (now, "quota"), (now, "overlap"))
        await insert_finished(
            browser, *(finished_job(at, "skipped", tenant_id="acme", reason=reason) for at, reason in skips)
        )
        page = (await browser.get("/ui/tenants")).text
        row = page.split('tenant=acme"')[1].split("</tr>")[0]
        assert re.findall(r'<td class="num" data-label="Skipped by quota">(\S+)</td>', row)[0] == "2"
        banner = re.sub(r"<[^>]+>|\s+", " ", (await browser.get("/ui/?tenant=acme")).text)
        assert re.search(r"480 of 500 jobs of this month used . Resets +\w+ 01 \w+.*?, 00:00 KST", banner)


async def test_platform_users_pick_one_of_the_tenants(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        for id_ in ("acme", "beta"):
            assert (await browser.web.post("/api/v1/tenants", {"id": id_})).status_code == 201
        page = (await browser.get("/ui/schedules?tenant=beta")).text
        assert re.findall(r"<option( selected)?>(\w+)</option>", page)[:3] == [
            ("", "acme"), (" selected", "beta"), ("", "default"),
        ]  # fmt: skip
        assert 'name="back" value="/ui/schedules"' in page  # the tenant of the URL does not come back
        picked = await browser.submit("/ui/schedules?tenant=beta", "/ui/shown", tenant="acme", back="/ui/schedules")
        assert "timebell-tenant=acme" in picked.headers["set-cookie"]
        await browser.create_user("vera", "viewer")
        await browser.sign_in("vera")
        assert 'name="tenant"' not in (await browser.get("/ui/schedules")).text


async def test_pages_and_forms_stay_in_the_tenant_that_a_link_selects(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        ids = {}
        for tenant_id in ("acme", "beta", "beta"):
            job = await browser.app.schedule_at(
                f"{tenant_id}.send", "2198-01-01T00:00", timezone="UTC", tenant_id=tenant_id
            )
            ids[tenant_id] = job.id
        url = f"/ui/jobs/{ids['beta']}"
        page = (await browser.get(f"{url}?tenant=beta")).text
        token = re.findall(r'name="_token" value="(\w+)"', page)[0]
        assert 'name="_tenant" value="beta"' in page
        assert "beta.send" in (await browser.get("/ui/jobs")).text  # the following page
        assert "acme.send" in (await browser.get("/ui/jobs?tenant=acme")).text  # another tab
        assert (await browser.post_form(f"{url}/cancel", {"_token": token})).status_code == 404
        cancelled = await browser.post_form(f"{url}/cancel", {"_token": token, "_tenant": "beta"})
        assert cancelled.status_code == 303
        found = await browser.app.get(ids["beta"])
        assert found.state == "cancelled"
        await browser.create_user("oda", "operator")
        await browser.sign_in("oda")
        token = re.findall(r'name="_token" value="(\w+)"', (await browser.get("/ui/jobs?tenant=acme")).text)[0]
        refused = await browser.post_form(f"/ui/jobs/{ids['acme']}/cancel", {"_token": token, "_tenant": "acme"})
        assert refused.status_code == 404


async def test_the_tenants_page_shows_unusual_tenant_ids(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        assert (await browser.web.post("/api/v1/tenants", {"id": "ana@acme.com"})).status_code == 201
        await browser.app.schedule_at("mail.send", "2198-01-01T00:00", timezone="UTC", tenant_id="acme/eu west")
        page = await browser.get("/ui/tenants")
        assert page.status_code == 200
        assert "ana@acme.com" in page.text


async def test_counts_of_the_last_hour_use_the_time_index(serve: Serve) -> None:
    async with serve() as browser:
        app = browser.app
        await app.open()
        now = app.clock.now()
        statements: list[tuple[str, Any]] = []
        unindexed = re.compile(r"\+timebell_finished\.tenant_id|timebell_finished\.tenant_id \|\| ''")

        def explain_queries(tx: Transaction) -> list[list[str]]:
            connection = tx.connection  # type: ignore[attr-defined]
            event.listen(connection, "before_cursor_execute", lambda *args: statements.append((args[2], args[3])))
            overview.get_status(tx, "default", now, 60.0, FEATURES)
            overview.count_outcomes(tx, "default", now - timedelta(hours=1), now)
            counts, explain = [each for each in statements if unindexed.search(each[0])], "EXPLAIN QUERY PLAN"
            if tx.dialect.name.startswith("postgresql"):
                connection.exec_driver_sql("SET LOCAL enable_seqscan = off")  # the table is almost empty
                explain = "EXPLAIN"
            plans = [connection.exec_driver_sql(f"{explain} {sql}", parameters) for sql, parameters in counts]
            return [[str(row[-1]) for row in plan] for plan in plans]

        plans = await app.store.run(explain_queries)
        assert len(plans) == 2
        for plan in plans:
            index_lines = [line for line in plan if "Index Cond" in line or "USING INDEX" in line]
            assert index_lines, plan
            assert all("finished_at" in line and "tenant_id" not in line for line in index_lines), plan


async def test_the_overview_shows_planned_runs_of_a_day_or_a_week(serve: Serve) -> None:
    async with serve(allow_local=True) as browser:
        soon, late = browser.app.clock.now() + timedelta(hours=5), browser.app.clock.now() + timedelta(days=5)
        for name, at in (("to-day", soon), ("later-on", late), ("every-minute", None)):
            when = {"cronExpression": "* * * * *" if at is None else f"{at.minute} {at.hour} {at.day} {at.month} *"}
            body = {**NIGHTLY, "name": name, "timezone": "UTC", **when}
            assert (await browser.web.post("/api/v1/schedules", body)).status_code == 201
        day, week = (await browser.get("/ui/")).text, (await browser.get("/ui/?days=7")).text
        assert "Next 24 hours" in day
        assert "later-on" not in day
        assert "Next 7 days" in week
        assert [week.count(f"<title>{name} · ") for name in ("to-day", "later-on", "every-minute")] == [1, 1, 0]
        (at,) = [float(x) for x in re.findall(r'cx="([\d.]+)" cy="\d+" r="4.5"><title>later-on', week)]
        assert 190 + 960 * 4.9 / 7 < at < 190 + 960 * 5 / 7
        assert len(re.findall(r'text-anchor="middle">\w{3} \d\d<', week)) == 7
