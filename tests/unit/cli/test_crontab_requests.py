"""Translating curl and wget lines of a crontab to http targets, and running them against a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.targets.http_servers import forward_proxy
from tests.unit.targets.sink import sink
from timebell import Timebell
from timebell.cli.importers.entry import NotExpressible
from timebell.cli.importers.http_commands import HttpCommand, parse_http_command

from .conftest import Cli

SECRET_KEY = "3f9a7c5e1b8d2640f7e3a9c5d1b80246f7e3a9c5d1b80246"
CRONTAB = r"""
CRON_TZ=Europe/Madrid
BASE=http://127.0.0.1:{port}
TOKEN=t0k3n-from-the-crontab
JSON='{{"kind": "nightly"}}'

* * * * *      curl {base}/echo/01
*/5 * * * *    curl -fsS -m 10 --retry 5 -o /dev/null {base}/echo/02
@hourly        curl -s "$BASE/echo/03?a=1&b=2" > /dev/null 2>&1
@daily         /usr/bin/curl -X POST "$BASE/echo/04"
0 2 * * *      curl -X POST -d 'name=a b&x=1' $BASE/echo/05
0 3 * * 1-5    curl -H 'Content-Type: application/json' -d '{{"report": "daily", "tags": [{{}}]}}' $BASE/echo/06
15 4 * * *     curl --json "$JSON" $BASE/echo/07 >/dev/null
30 4 * * *     curl -u app:pa55word-for-basic $BASE/echo/08
45 4 * * *     curl -H "Authorization: Bearer $TOKEN" $BASE/echo/09
0 5 1 * *      curl -sSfL -H "X-Api-Key: k3y-of-the-header" "$BASE/moved/302/echo/10" &>/dev/null
0 6 * * *      curl -G -d from=yesterday --data-urlencode "q=a b&c" $BASE/echo/11
0 7 * * *      curl -F name=value -F 'note=two words' $BASE/echo/12
0 8 * * *      curl -XPUT --data-raw 'plain {{{{text}}}}' -H 'Content-Type: text/plain' $BASE/echo/13
0 9 * * *      curl -X DELETE --max-time 30 $BASE/echo/14
0 10 * * *     curl -I $BASE/status/200/15
0 11 * * *     timeout 5m curl -A 'backup/1.0' -b 'session=c00kie-of-the-session' $BASE/echo/16 || true
0 12 * * *     curl -d @- $BASE/echo/17%from=stdin
0 13 * * *     curl -x 127.0.0.1:{proxy} $BASE/echo/18
0 14 * * *     wget -q -O /dev/null --header='X-Own: 1' $BASE/echo/19
0 15 * * *     wget -qO- --post-data 'a=b' --timeout=20 --tries=3 $BASE/echo/20
"""


def parse(command: str, stdin: str = "", **env: str) -> HttpCommand | None:
    return parse_http_command(command, env, stdin)


def test_twenty_curl_and_wget_lines_run_as_imported(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the crontab, trigger every schedule, and compare the requests with those of curl and wget themselves."""
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", SECRET_KEY)
    monkeypatch.setenv("TIMEBELL_WEBHOOK_ALLOW_PRIVATE", "true")

    async def main() -> tuple[list[Any], list[Any], str]:
        async with sink() as receiver, forward_proxy() as proxy:
            text = CRONTAB.format(port=receiver.port, proxy=proxy.port, base=f"http://127.0.0.1:{receiver.port}")
            done = await asyncio.to_thread(cli, "import", "crontab", "-", "--user", "-o", "json", stdin=text)
            assert done.code == 0, done.err
            rows = json.loads(done.out)
            assert [(row["outcome"], row["target"]) for row in rows] == [("created", "http")] * 20, done.err
            again = await asyncio.to_thread(cli, "import", "crontab", "-", "--user", "-o", "json", stdin=text)
            assert {row["outcome"] for row in json.loads(again.out)} == {"unchanged"}
            stored = await run_all(f"sqlite:///{tmp_path}/timebell.db")
            assert proxy.destinations == [f"127.0.0.1:{receiver.port}"]
            return receiver.requests, rows, stored + done.out + done.err

    requests, _, shown = asyncio.run(main())
    by_number = {request.line.split(" ")[1].split("?")[0][-2:]: request for request in requests}
    assert len(by_number) == 20
    assert summarize(by_number) == EXPECTED
    for secret in ("pa55word-for-basic", "t0k3n-from-the-crontab", "k3y-of-the-header", "c00kie-of-the-session"):
        assert secret not in shown
    by_line = {number: request.headers for number, request in by_number.items()}
    assert by_line["08"]["authorization"] == "Basic YXBwOnBhNTV3b3JkLWZvci1iYXNpYw=="
    assert by_line["09"]["authorization"] == "Bearer t0k3n-from-the-crontab"
    assert by_line["10"]["x-api-key"] == "k3y-of-the-header"
    assert (by_line["16"]["user-agent"], by_line["16"]["cookie"]) == ("backup/1.0", "session=c00kie-of-the-session")
    assert by_line["19"]["x-own"] == "1"
    assert b'name="note"\r\n\r\ntwo words\r\n' in by_number["12"].body


async def run_all(url: str) -> str:
    """Trigger every schedule once, and return everything that is stored about schedules, targets and jobs."""
    app = Timebell(url, timezone="UTC")
    try:
        async with app.running() as service:
            schedules = (await app.schedules.list(None, 100, None)).items
            jobs = [await app.schedules.trigger(schedule.id) for schedule in schedules]
            await service.wait_until_idle()
            finished = [await app.get(job.id) for job in jobs]
            assert {(job.state.value, job.error) for job in finished} == {("completed", None)}
            targets = (await app.targets.list(limit=100)).items
            return repr((schedules, targets, finished))
    finally:
        await app.close()


FORM = "application/x-www-form-urlencoded"
EXPECTED = {
    "01": ("GET /echo/01", None, ""),
    "02": ("GET /echo/02", None, ""),
    "03": ("GET /echo/03?a=1&b=2", None, ""),
    "04": ("POST /echo/04", None, ""),
    "05": ("POST /echo/05", FORM, "name=a b&x=1"),
    "06": ("POST /echo/06", "application/json", '{"report": "daily", "tags": [{}]}'),
    "07": ("POST /echo/07", "application/json", '{"kind": "nightly"}'),
    "08": ("GET /echo/08", None, ""),
    "09": ("GET /echo/09", None, ""),
    "10": ("GET /echo/10", None, ""),
    "11": ("GET /echo/11?from=yesterday&q=a+b%26c", None, ""),
    "12": ("POST /echo/12", "multipart/form-data", None),
    "13": ("PUT /echo/13", "text/plain", "plain {{text}}"),
    "14": ("DELETE /echo/14", None, ""),
    "15": ("HEAD /status/200/15", None, ""),
    "16": ("GET /echo/16", None, ""),
    "17": ("POST /echo/17", FORM, "from=stdin"),
    "18": ("GET /echo/18", None, ""),
    "19": ("GET /echo/19", None, ""),
    "20": ("POST /echo/20", FORM, "a=b"),
}


def summarize(requests: dict[str, Any]) -> dict[str, Any]:
    """Return method with path, media type and body of each request; not the body of a multipart form."""
    found = {}
    for number, request in sorted(requests.items()):
        media_type = request.headers.get("content-type")
        media_type = media_type and media_type.split("; boundary")[0]
        body = None if media_type == "multipart/form-data" else request.body.decode()
        found[number] = (request.line.removesuffix(" HTTP/1.1"), media_type, body)
    return found


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("curl -k https://a.example", "-k turns off"),
        ("curl --insecure https://a.example", "--insecure turns off"),
        ("wget --no-check-certificate -qO- https://a.example", "turns off"),
        ("curl https://a.example | jq .", "a pipe"),
        ("curl https://a.example && touch done", "&&"),
        ("curl https://a.example || mail root", "|| (a second command)"),
        ("cd /tmp; curl https://a.example", "; (a second command)"),
        ("curl https://a.example &", "in the background"),
        ("(curl https://a.example)", "a subshell"),
        ("curl https://a.example/$(date +%F)", "$(...)"),
        ("curl https://a.example/`hostname`", "`...`"),
        ("curl https://a.example/$UNSET", "variable UNSET"),
        ('curl "https://a.example/${UNSET:-x}"', "an expansion"),
        ("curl https://a.example > /var/log/x", "writes to the file /var/log/x"),
        ("curl https://a.example >> x 2>&1", "writes to the file x"),
        ("curl -o x https://a.example", "writes to the file x"),
        ("curl -O https://a.example/x", "writes a file"),
        ("wget https://a.example/x", "writes a file"),
        ("curl -T x https://a.example", "reads a file"),
        ("curl -d @x https://a.example", "sends the file x"),
        ("curl -F a=@x https://a.example", "sends a file"),
        ("curl -d @- https://a.example < x", "reads the file x"),
        ("curl -K x", "reads a file"),
        ("curl --unix-socket /run/docker.sock http://a.example", "--unix-socket has no equivalent"),
        ("curl https://a.example https://b.example", "requests 2 URLs"),
        ("curl", None),
        ("curl -s ", "requests 0 URLs"),
        ("curl 'https://a.example/[1-3]'", "curl expands"),
        ("curl ftp://a.example/", "ftp"),
        ("curl -u app https://a.example", "no password"),
        ("curl -u a:b -H 'Authorization: x' https://a.example", "both credentials"),
        ("curl -u a: -H 'Authorization: x' https://a.example", "both credentials"),
        ("curl -H 'Content-Type:' -d x https://a.example", "removes the header content-type"),
        ("curl -H 'X-A: 1' -H 'x-a: 2' https://a.example", "the header x-a twice"),
        ("curl -d a=1 -F b=2 https://a.example", "-d and -F exclude each other"),
        ("wget -qO- -a /var/log/x https://a.example", "writes to the file /var/log/x"),
        ("curl --retry 1000 https://a.example", "1000 retries"),
        ("curl --cacert /nowhere https://a.example", "cannot be read here"),
        ("curl 'https://a.example", "not closed"),
        ("A=b curl https://a.example", "for this command only"),
        ("echo curl is fine", None),
        ("/usr/local/bin/backup --full", None),
    ],
)
def test_what_cannot_be_translated_is_named(command: str, reason: str | None) -> None:
    if reason is None:
        assert parse(command) is None
        return
    with pytest.raises(NotExpressible) as caught:
        parse(command)
    assert reason in str(caught.value)


def test_timeouts_and_retries_are_translated() -> None:
    found = parse("curl -m 90 --retry 4 --retry-delay 7 https://a.example/")
    assert found is not None
    assert (found.options["timeout"], found.retry.attempts, found.retry.delay) == (90.0, 5, 7.0)
    found = parse("timeout 30 wget -t 2 -T 900 -qO- https://a.example/")
    assert found is not None
    assert (found.options["timeout"], found.retry.attempts) == (30.0, 2)


def test_certificates_are_read_from_their_files(tmp_path: Path) -> None:
    for name in ("ca", "client", "key"):
        (tmp_path / name).write_text(f"-----BEGIN {name}")
    found = parse(f"curl --cacert {tmp_path}/ca --cert {tmp_path}/client --key {tmp_path}/key https://a.example/")
    assert found is not None
    assert found.options["tls"] == {
        "ca": "-----BEGIN ca", "certificate": "-----BEGIN client", "key": {"secret": "client-key"}
    }  # fmt: skip
    assert found.secrets == {"client-key": "-----BEGIN key"}


def test_lines_that_stay_commands_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", SECRET_KEY)
    text = "@daily curl -k https://a.example\n@daily curl http://127.0.0.1/cron\n@daily curl https://a.example/ok\n"
    arguments = ("import", "crontab", "-", "--user", "--timezone", "UTC", "-o", "json")
    refused = cli(*arguments, stdin=text)
    assert refused.code == 1
    assert [(row["line"], row["target"]) for row in json.loads(refused.out)] == [(3, "http")]
    assert "line 1: -k turns off" in refused.err
    assert "line 2: Plain http is disabled. Use an https URL. Commands require" in refused.err
    assert "TIMEBELL_COMMAND_ENABLED=true" in refused.err
    monkeypatch.setenv("TIMEBELL_COMMAND_ENABLED", "true")
    done = cli(*arguments, stdin=text)
    assert done.code == 0
    assert "line 1: stays a command: -k turns off" in done.err
    assert [row["target"] for row in json.loads(done.out)] == ["command", "command", "http"]


def test_credentials_need_the_secret_key(cli: Cli) -> None:
    done = cli("import", "crontab", "-", "--user", "--timezone", "UTC", stdin="@daily curl -u a:b https://a.example\n")
    assert done.code == 4
    assert "TIMEBELL_SECRET_KEY" in done.err
