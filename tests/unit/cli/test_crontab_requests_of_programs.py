"""Imported lines of a crontab send the requests that curl and wget send for the same lines."""

from __future__ import annotations

import asyncio
import email
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.tls import Authority, served
from tests.unit.targets.sink import Sink, sink
from timebell.cli.crontab import parse

from .conftest import Cli
from .test_crontab_requests import run_all

Sent = dict[str, list[tuple[str, dict[str, str], Any]]]

CRONTAB = r"""
CRON_TZ=Europe/Madrid
BASE={base}
SECURE={secure}
TOKEN=t0k3n-from-the-crontab
AGENT="backup 1.0 (cron)"

* * * * *     curl -sS -o /dev/null $BASE/echo/01
*/5 * * * *   curl -fsS -m 10 --retry 5 --retry-delay 2 -o /dev/null "$BASE/echo/02?a=1&b=2" > /dev/null 2>&1
0 2 * * *     curl -X POST -H 'Content-Type: application/json' -d '{{"report": "daily", "tags": [{{}}]}}' $BASE/echo/03
0 3 * * 1-5   curl -s -u 'app:pa55 wörd' -d 'name=a b' -d x=1 $BASE/echo/04
15 4 * * *    curl --silent --header "Authorization: Bearer $TOKEN" --request PUT --data '{{"on": true}}' $BASE/echo/05
30 4 * * *    curl --data-urlencode 'q=a b&c=ü/~' --data-urlencode 'plain text' $BASE/echo/06
45 4 * * *    curl -G -d from=yesterday --data-urlencode "q=a b&c" "$BASE/echo/07?x=1"
0 5 1 * *     curl -sSf --cacert {ca} --json '{{"kind": "nightly"}}' $SECURE/echo/08
0 6 * * *     curl -F name=value -F name=again -F 'note=two words' --form-string 'at=@home' $BASE/echo/09
0 7 * * *     curl -X DELETE --max-time 30 -H "X-Api-Key: k3y-in-a-header" -H 'X-Reason: a, b' $BASE/echo/10
0 8 * * *     curl -A "$AGENT" -e https://a.example/page -b 'session=c00kie; theme=dark' $BASE/echo/11
30 8 * * *    curl -u sk_live_1: $BASE/echo/12
35 8 * * *    curl -u ":$TOKEN" $BASE/echo/13
40 8 * * *    curl http://k3y-in-a-url@127.0.0.1:{port}/echo/14
0 9 * * *     curl -I $BASE/status/200/15
0 10 * * *    curl --data-binary @- -H "Content-Type: text/plain" $BASE/echo/16%two%lines
0 11 * * *    curl -d '' -H 'Expect:' --compressed $BASE/echo/17
0 12 * * *    curl -sL -X POST -d a=1 $BASE/moved/307/echo/18
0 13 * * *    curl -sL $BASE/moved/302/echo/19 || true
0 14 * * *    curl --oauth2-bearer "$TOKEN" "$BASE/echo/20?done=50\%25&next=a+b"
0 15 * * *    curl http://user:s3cret\%40x@127.0.0.1:{port}/echo/21#part
0 16 * * *    timeout 5m nice -n 10 curl -X PATCH -d 'text={{{{name}}}}' $BASE/echo/22
0 17 * * *    curl -X GET -d '{{"query": 1}}' -H "accept: text/csv" -H "Content-Type: application/json" $BASE/echo/23
0 18 * * *    wget -q -O /dev/null --header='X-Own: 1' --user-agent="$AGENT" "$BASE/echo/24?a=b+c"
0 19 * * *    wget -qO- --post-data 'a=b&c=d e' --timeout=20 --tries=3 $BASE/echo/25
0 20 * * *    wget -q --method=PUT --body-data='{{"a": 1}}' --header='Content-Type: application/json' -O- $BASE/echo/26
0 21 * * *    wget -q --spider $BASE/status/200/27
0 22 * * *    wget -qO- --auth-no-challenge --user=app --password='pa55 wörd' --ca-certificate={ca} $SECURE/echo/28
30 22 * * *   wget -O - -o /dev/null -t 1 "$BASE/echo/29?cron=1" > /dev/null
0 23 * * *    wget -qO /dev/null --referer=https://a.example/ $BASE/moved/302/echo/30
"""
COUNT = 30
SECRETS = ("pa55 wörd", "t0k3n-from-the-crontab", "k3y-in-a-header", "c00kie", "sk_live_1", "k3y-in-a-url", "s3cret")
CONNECTION_HEADERS = {"host", "connection", "content-length", "accept-encoding"}


@pytest.mark.skipif(not all(map(shutil.which, ("curl", "wget"))), reason="curl and wget are not installed")
def test_imported_lines_send_the_requests_of_curl_and_wget(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", "3f9a7c5e1b8d2640f7e3a9c5d1b80246f7e3a9c5d1b80246")
    monkeypatch.setenv("TIMEBELL_WEBHOOK_ALLOW_PRIVATE", "true")
    authority = Authority(tmp_path)

    async def main() -> tuple[Sent, Sent]:
        async with sink() as plain, sink(served(authority.of_loopback()), Sink(requests=plain.requests)) as secure:
            text = CRONTAB.format(
                base=f"http://127.0.0.1:{plain.port}", secure=f"https://127.0.0.1:{secure.port}", port=plain.port,
                ca=authority.root,
            )  # fmt: skip
            await run_programs(text)
            of_programs = take_requests(plain)
            done = await asyncio.to_thread(cli, "import", "crontab", "-", "--user", "-o", "json", stdin=text)
            assert (done.code, [row["target"] for row in json.loads(done.out)]) == (0, ["http"] * COUNT), done.err
            stored = await run_all(f"sqlite:///{tmp_path}/timebell.db")
            assert not [secret for secret in SECRETS if secret in stored + done.out + done.err]
            return of_programs, take_requests(plain)

    of_programs, of_targets = asyncio.run(main())
    assert len(of_programs) == COUNT
    for number, requests in of_programs.items():
        assert of_targets.get(number) == requests


async def run_programs(crontab: str) -> None:
    """Run the commands as cron does."""
    for entry in parse(crontab, system=False).entries:
        process = await asyncio.create_subprocess_exec(
            entry.shell, "-c", entry.command, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **entry.env},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await process.communicate(entry.stdin.encode())
        assert process.returncode == 0, entry.command


def take_requests(receiver: Sink) -> Sent:
    """Return what was received by the number at the end of its path, without what depends on the connection."""
    sent: Sent = defaultdict(list)
    for request in receiver.requests:
        target = request.line.removesuffix(" HTTP/1.1")
        headers = {name: value for name, value in request.headers.items() if name not in CONNECTION_HEADERS}
        if headers.get("user-agent", "").startswith(("curl/", "Wget/", "timebell")):
            del headers["user-agent"]
        body: Any = request.body.decode()
        if headers.get("content-type", "").startswith("multipart/form-data"):
            form = email.message_from_string(f"Content-Type: {headers.pop('content-type')}\n\n{body}")
            body = [
                (part["content-disposition"], part.get_payload()) for part in form.walk() if not part.is_multipart()
            ]
        requests = sent[target.split(" ")[1].split("?")[0][-2:]]
        if (target, headers, body) not in requests:  # a schedule may also fire on its own meanwhile
            requests.append((target, headers, body))
    receiver.requests.clear()
    return sent
