"""Starts nodes quickly: a process that has imported everything and forks a node for each request.

Requests are lines of JSON on stdin, each answered with one on stdout: {"url", "effects", "log", "environment"} starts
a node and gives its pid; {"pid", "seconds"} waits so long for its end and gives its exit code, or null. When stdin
ends, so do the nodes that are left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback

import alembic.command  # noqa: F401 - what a node would import later is imported once, here
import asyncpg  # noqa: F401
import sqlalchemy.dialects.postgresql.asyncpg
import sqlalchemy.dialects.sqlite
import sqlalchemy.ext.asyncio  # noqa: F401

from tests.faults import node

codes: dict[int, int | None] = {}


def start(url: str, effects: str, log: str, environment: dict[str, str]) -> int:
    """A node in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        codes[pid] = None
        return pid
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        node.run(url, effects)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int, seconds: float) -> int | None:
    """The exit code of a node (negative: the signal), or None if it still is there after so long."""
    limit = time.monotonic() + seconds
    while codes[pid] is None:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > limit:
            break
        else:
            time.sleep(0.01)
    return codes[pid]


def main() -> None:
    """Answer requests until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(start(**request) if "url" in request else ended(**request)), flush=True)
    for pid, code in codes.items():
        if code is None:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
