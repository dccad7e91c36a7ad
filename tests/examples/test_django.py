"""The Django shop: an order and its reminder in one transaction, run by `manage.py timebell run`."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.servers import free_port

from .processes import EXAMPLES, run_program, running_program, wait_until

FOLDER = EXAMPLES / "django_app"
SET_UP = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True, verbosity=0)
call_command("createsuperuser", interactive=False, username="ana", email="ana@example.com")
call_command("timebell", "db", "upgrade")
"""
TOKEN = re.compile(r'name="csrfmiddlewaretoken" value="([^"]+)"')


def database(url: str) -> dict[str, str]:
    """Return the environment variables that the settings of the shop read."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {"SHOP_DATABASE_FILE": parts.path[1:]}
    return {
        "SHOP_DATABASE": parts.path[1:], "SHOP_DATABASE_USER": parts.username or "",
        "SHOP_DATABASE_HOST": parts.hostname or "", "SHOP_DATABASE_PORT": str(parts.port),
    }  # fmt: skip


@pytest.mark.parametrize("store", ["postgres", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_an_order_and_its_reminder_are_one_transaction(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    port, where = free_port(), database(request.getfixturevalue(f"{store}_url"))
    run_program("-c", SET_UP, folder=FOLDER, DJANGO_SUPERUSER_PASSWORD="cup-of-tea", **where)
    web = running_program(tmp_path / "web", "manage.py", "runserver", "--noreload", str(port), folder=FOLDER, **where)
    engine = running_program(
        tmp_path / "engine", "manage.py", "timebell", "run", "--roles", "planner,worker", folder=FOLDER, **where
    )
    with web, engine, httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

        def answers() -> bool:
            try:
                return client.get("/admin/login/").is_success
            except httpx2.TransportError:
                return False

        wait_until(answers)
        created = client.post("/orders", data={"customer": "bo"}).json()
        assert client.post("/orders", data={"customer": "cy", "fail": "1"}).status_code == 500
        wait_until(lambda: client.get(f"/jobs/{created['job']}").json()["state"] == "completed")
        assert client.get(f"/jobs/{created['job']}").json()["result"] == "bo is reminded"

        token = TOKEN.search(client.get("/admin/login/").text)
        assert token
        form = {"username": "ana", "password": "cup-of-tea", "csrfmiddlewaretoken": token[1], "next": "/admin/"}
        assert client.post("/admin/login/", data=form).headers["location"] == "/admin/"
        assert '<a href="http://127.0.0.1:8700/ui/">Schedules and jobs</a>' in client.get("/admin/").text
        listed = client.get("/admin/shop/order/").text
        assert '<a href="http://127.0.0.1:8700/ui/jobs?q=owner%3Abo">jobs</a>' in listed
        assert "owner%3Acy" not in listed  # the order was rolled back too
        assert re.search(r"1 order\b", listed)
