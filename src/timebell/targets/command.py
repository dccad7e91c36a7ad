"""Deliver by running a command. Off unless the operator turns it on: a job could then run any program.

The command is a list of arguments and never a shell's line. It runs in a session of its own with a clean
environment; when it ends, or its time is up, everything left in its process group is ended with it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from timebell.errors import InvalidInput, InvalidPayload, Refused
from timebell.targets import bodies
from timebell.targets.base import KEPT_BYTES, Delivery, Outcome, instant, only, text

CLEAN_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
LONGEST_STDIN = 64 * 1024

_OFF = ("Running commands is off.", "To allow it, set TIMEBELL_COMMAND_ENABLED=true.")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_NOT_RUNNABLE = {errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.ELOOP, errno.EPERM}


class CommandTarget:
    """Runs `argv`. Options: `argv`; `env`, `cwd` (absolute), `stdin` or those of the body are optional.

    Without `stdin` the command reads the body (by default "plain"), one line of JSON; an empty string gives it
    nothing to read. `environment` is what every command starts from, before `env` and the
    TIMEBELL_ variables. `grace` (seconds) lies between SIGTERM and SIGKILL.
    """

    kind = "command"

    def __init__(self, enabled: bool, environment: Mapping[str, str] = CLEAN_ENVIRONMENT, grace: float = 5.0) -> None:
        self._enabled = enabled
        self._environment = dict(environment)
        self._grace = grace

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused (COMMAND_TARGET_OFF) or InvalidInput (TARGET_OPTIONS_INVALID, TEMPLATE_INVALID)."""
        if not self._enabled:
            raise Refused(_OFF[0], code="COMMAND_TARGET_OFF", fix=_OFF[1])
        only(options, ("argv", "env", "cwd", "stdin", *bodies.OPTIONS))
        argv, env = options.get("argv"), options.get("env") or {}
        cwd, stdin = options.get("cwd"), options.get("stdin")
        if not isinstance(argv, list) or not argv or not argv[0] or not all(map(_is_text, argv)):
            raise _invalid('argv is a list of strings, the program first: ["/usr/bin/env", "true"].')
        if not isinstance(env, dict) or not all(_is_variable(*item) for item in env.items()):
            raise _invalid("env maps names (letters, digits and _, not TIMEBELL_...) to strings.")
        if cwd is not None and not (_is_text(cwd) and os.path.isabs(cwd)):
            raise _invalid("cwd is an absolute path.")
        if stdin is not None and not (isinstance(stdin, str) and len(stdin) <= LONGEST_STDIN):
            raise _invalid(f"stdin is a string of at most {LONGEST_STDIN} characters.")
        checked: dict[str, Any] = {"argv": argv, "env": env, "cwd": cwd, "stdin": stdin}
        if options.keys() & set(bodies.OPTIONS):
            if stdin is not None:
                raise _invalid("stdin and body are two answers to what the command reads: give one.")
            checked |= bodies.checked(options, "plain")
        return checked

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Exit status 0 is delivered. Codes of failure: EXIT_STATUS, COMMAND_NOT_FOUND (final),
        COMMAND_NOT_STARTED, COMMAND_TARGET_OFF (final), BODY_UNFIT and MESSAGE_TOO_LARGE (final)."""
        if not self._enabled:
            return Outcome.failed("COMMAND_TARGET_OFF", " ".join(_OFF), retryable=False)
        stdin = options.get("stdin")
        try:
            if stdin is None:
                stdin = bodies.render(delivery, options, "plain").data.decode() + "\n"
        except InvalidPayload as unfit:
            return Outcome.failed(unfit.code, str(unfit), retryable=False)
        try:
            run = await self._start(delivery, options)
        except (OSError, ValueError) as error:  # ValueError: text that the system's encoding cannot hold
            return _not_started(options, error)
        try:
            run.feed(stdin.encode(errors="replace"))
            await run.exited.wait()
        finally:
            await self._end(run)
        return run.outcome()

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """What would be run, and what it would read. Raises InvalidPayload (BODY_UNFIT, MESSAGE_TOO_LARGE)."""
        given = options.get("stdin")
        return {
            "argv": options["argv"], "cwd": options.get("cwd"), "env": {**options["env"], **_variables(delivery)},
            "body": bodies.render(delivery, options, "plain").data.decode() if given is None else given,
        }  # fmt: skip

    async def close(self) -> None:
        """Nothing outlives a delivery."""

    async def _start(self, delivery: Delivery, options: dict[str, Any]) -> _Run:
        """The command runs before asyncio has connected its pipes; cancelled in between, asyncio would kill the
        process but not its children. So the start itself is never cancelled, only abandoned."""
        starting = asyncio.create_task(self._spawn(delivery, options))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)  # holds even if this is cancelled once more
            await asyncio.wait([starting])
            if starting.exception() is None:
                await self._end(starting.result())
            raise

    async def _spawn(self, delivery: Delivery, options: dict[str, Any]) -> _Run:
        pipe = asyncio.subprocess.PIPE
        _, run = await asyncio.get_running_loop().subprocess_exec(
            _Run,
            *options["argv"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=options.get("cwd"),
            env={**self._environment, **(options.get("env") or {}), **_variables(delivery)},
            start_new_session=True,
        )
        return run

    async def _end(self, run: _Run) -> None:
        """End what is left of the process group, politely, then by force, also when cancelled meanwhile."""
        try:
            run.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await run.finished.wait()
        finally:
            run.signal(signal.SIGKILL)
            try:
                with suppress(TimeoutError):  # a process in an uninterruptible call, or another user's
                    async with asyncio.timeout(self._grace):
                        await run.exited.wait()
            finally:
                run.transport.close()


class _Run(asyncio.SubprocessProtocol):
    """One process. Output is cut to its tail as it comes, so no amount of it takes memory."""

    transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        self.exited = asyncio.Event()  # the process itself has ended, and has been waited for
        self.finished = asyncio.Event()  # and nobody holds its output open any more
        self._tails = {1: bytearray(), 2: bytearray()}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self._tails[fd]
        tail += data
        del tail[:-KEPT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finished.set()

    def feed(self, data: bytes) -> None:
        stdin = cast(asyncio.WriteTransport, self.transport.get_pipe_transport(0))
        with suppress(RuntimeError):  # a command that ends without reading is no error, which uvloop makes it
            stdin.write(data)
            stdin.close()  # after what is buffered

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, which the process leads (POSIX setsid) and which may outlive it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.transport.get_pid(), number)

    def outcome(self) -> Outcome:
        status = self.transport.get_returncode()
        result = {"exitCode": status, "stdout": text(self._tails[1]), "stderr": text(self._tails[2])}
        if status == 0:
            return Outcome.ok(result)
        how = f"exited with {status}" if status is None or status > 0 else f"was ended by signal {-status}"
        return Outcome.failed("EXIT_STATUS", f"The command {how}.", result=result)


def _abandon(starting: asyncio.Task[_Run]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().signal(signal.SIGKILL)
        starting.result().transport.close()


def _variables(delivery: Delivery) -> dict[str, str]:
    return {
        "TIMEBELL_JOB_ID": delivery.job_id,
        "TIMEBELL_TOPIC": delivery.topic,
        "TIMEBELL_SCHEDULED_AT": instant(delivery.scheduled_at),
        "TIMEBELL_ATTEMPT": str(delivery.attempt),
        "TIMEBELL_OCCURRENCE_KEY": delivery.occurrence_key,
    }


def _not_started(options: dict[str, Any], error: OSError | ValueError) -> Outcome:
    program, cwd = options["argv"][0], options.get("cwd")
    why = f"{program} was not started{f' in {cwd}' if cwd else ''}: {getattr(error, 'strerror', None) or error}."
    if isinstance(error, OSError) and error.errno not in _NOT_RUNNABLE:  # out of processes, files or memory
        return Outcome.failed("COMMAND_NOT_STARTED", why)
    return Outcome.failed("COMMAND_NOT_FOUND", why, retryable=False)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\x00" not in value


def _is_variable(name: object, value: object) -> bool:
    good = isinstance(name, str) and _VARIABLE.fullmatch(name) and not name.startswith("TIMEBELL_")
    return bool(good) and _is_text(value)


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(message, code="TARGET_OPTIONS_INVALID")
