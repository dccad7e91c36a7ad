"""The form of http targets: create, edit, and test with a payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.targets.sink import sink
from timebell.dashboard.target_form import to_form, to_options

Serve = Callable[..., Any]

OPTIONS = {
    "url": "https://api.example/", "method": "PUT", "body": "text", "template": "a={{payload.a}}", "timeout": "10m",
    "contentType": "text/csv", "query": {"a": "b", "list": ["x", "y"]}, "concurrency": 2, "rate": 5, "perSeconds": 60,
    "headers": {"x-own": "1", "x-key": {"secret": "key"}}, "success": [200, "3xx"], "followRedirects": True,
    "expect": {"contains": "OK", "json": {"a": 1}}, "signed": False, "reportsBack": True,
    "auth": {
        "type": "oauth2", "clientId": "app", "clientSecret": {"secret": "client"}, "tokenUrl": "https://t.example/",
        "scope": "a b", "parameters": {"audience": "x"}, "clientAuthentication": "body",
    },
    "tls": {"ca": "PEM", "certificate": "PEM", "key": {"secret": "key"}},
    "proxy": {"url": "http://proxy.example:3128", "username": "u", "password": {"secret": "p"}},
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {"url": "https://a.example/", "method": "POST"},
        {"url": "https://a.example/", "method": "POST", "body": "template", "template": {"a": ["{{payload.b}}"]}},
        {"url": "https://a.example/", "method": "GET", "auth": {"type": "bearer", "token": {"secret": "t"}}},
        {"url": "https://a.example/", "method": "GET", "expect": {"json": {"a": True}}, "fields": {"omitNull": True}},
    ],
)
def test_a_form_that_is_saved_unchanged_changes_no_option(options: dict[str, Any]) -> None:
    assert to_options(to_form(options), options) == options


async def test_a_target_is_created_edited_and_tested_on_its_pages(serve: Serve) -> None:
    async with serve() as browser, sink() as receiver:
        browser.app.settings = replace(browser.app.settings, webhook_allow_private=True)
        await browser.create_user()
        await browser.sign_in()
        await browser.app.secrets.put("token", "hunter2-token")
        assert 'href="/ui/targets/new"' in (await browser.get("/ui/targets")).text
        page = (await browser.get("/ui/targets/new")).text
        assert '<option value="token"' in page
        form = {
            "name": "crm", "url": f"http://127.0.0.1:{receiver.port}/echo", "method": "PUT", "body": "form",
            "template": '{"a": "{{payload.a}}"}', "auth": "bearer", "authSecret": "token", "query": "q=1",
        }  # fmt: skip
        wrong = await browser.submit("/ui/targets/new", "/ui/targets/new", **form | {"query": "no value"})
        assert (wrong.status_code, "INVALID_FIELDS" in wrong.text, 'value="crm"' in wrong.text) == (422, True, True)
        refused = await browser.submit("/ui/targets/new", "/ui/targets/new", **form | {"timeout": "31m"})
        assert (refused.status_code, "INVALID_TIMEOUT" in refused.text) == (422, True)
        for fields, located in (
            ({"success": "9" * 25}, 'aria-describedby="success-problem'),
            ({"url": "ftp://x"}, 'aria-describedby="url-problem'),
            ({"proxyUrl": "ftp://x"}, "url is not a plain http or https URL"),
        ):  # fmt: skip
            refused = await browser.submit("/ui/targets/new", "/ui/targets/new", **form | fields)
            assert (refused.status_code, located in refused.text) == (422, True), fields
            assert ("url-problem" in refused.text) == ("url" in fields)
        created = await browser.submit("/ui/targets/new", "/ui/targets/new", **form)
        assert "whsec_" in created.text
        edit = "/ui/targets/crm/edit"
        page = (await browser.get(edit)).text
        assert "hunter2" not in page
        etag = page.split('name="etag" value="')[1].split('">')[0].replace("&#34;", '"')
        changed = await browser.submit(edit, edit, **form | {"etag": etag, "query": "q=2"})
        assert (changed.status_code, changed.headers["location"]) == (303, "/ui/targets?did=saved")
        stale = await browser.submit(edit, edit, **form | {"etag": etag, "query": "q=3"})
        assert stale.status_code == 412
        tested = await browser.submit("/ui/targets", "/ui/targets/crm/test", payload='{"a": "it works"}')
        assert "Delivered" in tested.text
        assert receiver.requests[-1].line == "PUT /echo?q=2 HTTP/1.1"
        assert receiver.requests[-1].body == b"a=it+works"
        assert "hunter2" not in tested.text
