"""Deliver by running a command. Disabled by default, because a job can then run any program.

The command is a list of arguments and is never interpreted by a shell. It runs in its own session with a clean
environment. When it ends or times out, the rest of its process group is terminated.
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
from timebell.targets.base import (
    STORED_OUTPUT_BYTES,
    Delivery,
    Outcome,
    decode_text,
    format_utc,
    reject_unknown_options,
)

CLEAN_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
MAX_STDIN_CHARS = 64 * 1024

_DISABLED = ("The command target is disabled.", "To enable it, set TIMEBELL_COMMAND_ENABLED=true.")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_NOT_RUNNABLE = {errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.ELOOP, errno.EPERM}


class CommandTarget:
    """Runs `argv`. Options: `argv`; optionally `env`, `cwd` (absolute), and `stdin` or the body options.

    Without `stdin`, the command reads the body (by default "plain") as one line of JSON; with an empty `stdin`, it
    reads nothing. `environment` is the base environment of all commands, extended by `env` and the TIMEBELL_
    variables. `grace` is the time between SIGTERM and SIGKILL in seconds.
    """

    kind = "command"

    def __init__(self, enabled: bool, environment: Mapping[str, str] = CLEAN_ENVIRONMENT, grace: float = 5.0) -> None:
        self._enabled = enabled
        self._environment = dict(environment)
        self._grace = grace

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate options.

        Raises Refused (COMMAND_TARGET_OFF) or InvalidInput (INVALID_TARGET_OPTIONS, INVALID_TEMPLATE).
        """
        if not self._enabled:
            raise Refused(_DISABLED[0], code="COMMAND_TARGET_OFF", fix=_DISABLED[1])
        reject_unknown_options(options, ("argv", "env", "cwd", "stdin", *bodies.OPTIONS))
        argv, env = options.get("argv"), options.get("env") or {}
        cwd, stdin = options.get("cwd"), options.get("stdin")
        if not isinstance(argv, list) or not argv or not argv[0] or not all(map(_is_text, argv)):
            raise _invalid('argv must be a list of strings, the program first: ["/usr/bin/env", "true"].')
        if not isinstance(env, dict) or not all(_is_variable(*item) for item in env.items()):
            raise _invalid("env must map names (letters, digits and _, not TIMEBELL_...) to strings.")
        if cwd is not None and not (_is_text(cwd) and os.path.isabs(cwd)):
            raise _invalid("cwd must be an absolute path.")
        if stdin is not None and not (isinstance(stdin, str) and len(stdin) <= MAX_STDIN_CHARS):
            raise _invalid(f"stdin must be a string of at most {MAX_STDIN_CHARS} characters.")
        checked: dict[str, Any] = {"argv": argv, "env": env, "cwd": cwd, "stdin": stdin}
        if options.keys() & set(bodies.OPTIONS):
            if stdin is not None:
                raise _invalid("stdin and body options both define the command's input: use one of them.")
            checked |= bodies.check_options(options, "plain")
        return checked

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Run the command; exit status 0 means delivered.

        Failure codes: EXIT_STATUS, COMMAND_NOT_STARTED, COMMAND_TARGET_OFF; final: COMMAND_NOT_FOUND, INVALID_BODY,
        MESSAGE_TOO_LARGE.
        """
        if not self._enabled:
            return Outcome.failed("COMMAND_TARGET_OFF", " ".join(_DISABLED))
        stdin = options.get("stdin")
        try:
            if stdin is None:
                stdin = bodies.render(delivery, options, "plain").data.decode() + "\n"
        except InvalidPayload as error:
            return Outcome.failed(error.code, str(error), retryable=False)
        try:
            process = await self._start(delivery, options)
        except (OSError, ValueError) as error:  # ValueError: text that cannot be encoded for the system
            return _start_failed(options, error)
        try:
            process.write_stdin(stdin.encode(errors="replace"))
            await process.exited.wait()
        finally:
            await self._terminate(process)
        return process.outcome()

    def preview(self, delivery: Delivery, options: dict[str, Any]) -> dict[str, Any]:
        """Return the command and its input. Raises InvalidPayload (INVALID_BODY, MESSAGE_TOO_LARGE)."""
        stdin = options.get("stdin")
        return {
            "argv": options["argv"], "cwd": options.get("cwd"), "env": {**options["env"], **_variables(delivery)},
            "body": bodies.render(delivery, options, "plain").data.decode() if stdin is None else stdin,
        }  # fmt: skip

    async def close(self) -> None:
        """Do nothing: no resource outlives a delivery."""

    async def _start(self, delivery: Delivery, options: dict[str, Any]) -> _Process:
        """Start the command; if cancelled meanwhile, wait for the start, then terminate the process group.

        The process runs before asyncio has connected its pipes. If the start were cancelled in between, asyncio would
        kill the process but not its children, so it is shielded.
        """
        starting = asyncio.create_task(self._spawn(delivery, options))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill_abandoned)  # in case the wait below is cancelled too
            await asyncio.wait([starting])
            if starting.exception() is None:
                await self._terminate(starting.result())
            raise

    async def _spawn(self, delivery: Delivery, options: dict[str, Any]) -> _Process:
        pipe = asyncio.subprocess.PIPE
        _, process = await asyncio.get_running_loop().subprocess_exec(
            _Process,
            *options["argv"],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=options.get("cwd"),
            env={**self._environment, **(options.get("env") or {}), **_variables(delivery)},
            start_new_session=True,
        )
        return process

    async def _terminate(self, process: _Process) -> None:
        """Terminate the rest of the process group with SIGTERM, then SIGKILL, even if cancelled meanwhile."""
        try:
            process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await process.finished.wait()
        finally:
            process.send_signal(signal.SIGKILL)
            try:
                with suppress(TimeoutError):  # the process may be uninterruptible or belong to another user
                    async with asyncio.timeout(self._grace):
                        await process.exited.wait()
            finally:
                process.transport.close()


class _Process(asyncio.SubprocessProtocol):
    """A running process. Only the tail of its output is kept, so that memory use is bounded."""

    transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        self.exited = asyncio.Event()  # the process has ended and was reaped
        self.finished = asyncio.Event()  # additionally, all its output pipes are closed
        self._tails = {1: bytearray(), 2: bytearray()}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self._tails[fd]
        tail += data
        del tail[:-STORED_OUTPUT_BYTES]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finished.set()

    def write_stdin(self, data: bytes) -> None:
        stdin = cast(asyncio.WriteTransport, self.transport.get_pipe_transport(0))
        with suppress(RuntimeError):  # uvloop raises if the command ended without reading
            stdin.write(data)
            stdin.close()  # after the buffered data is written

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group, which the process leads (POSIX setsid) and which may outlive it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.transport.get_pid(), number)

    def outcome(self) -> Outcome:
        status = self.transport.get_returncode()
        result = {"exitCode": status, "stdout": decode_text(self._tails[1]), "stderr": decode_text(self._tails[2])}
        if status == 0:
            return Outcome.ok(result)
        ending = f"exited with {status}" if status is None or status > 0 else f"was terminated by signal {-status}"
        return Outcome.failed("EXIT_STATUS", f"The command {ending}.", result=result)


def _kill_abandoned(starting: asyncio.Task[_Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().send_signal(signal.SIGKILL)
        starting.result().transport.close()


def _variables(delivery: Delivery) -> dict[str, str]:
    return {
        "TIMEBELL_JOB_ID": delivery.job_id,
        "TIMEBELL_TOPIC": delivery.topic,
        "TIMEBELL_SCHEDULED_AT": format_utc(delivery.scheduled_at),
        "TIMEBELL_ATTEMPT": str(delivery.attempt),
        "TIMEBELL_OCCURRENCE_KEY": delivery.occurrence_key,
    }


def _start_failed(options: dict[str, Any], error: OSError | ValueError) -> Outcome:
    program, cwd = options["argv"][0], options.get("cwd")
    message = f"{program} was not started{f' in {cwd}' if cwd else ''}: {getattr(error, 'strerror', None) or error}."
    if (
        isinstance(error, OSError) and error.errno not in _NOT_RUNNABLE
    ):  # for example, out of processes, files or memory
        return Outcome.failed("COMMAND_NOT_STARTED", message)
    return Outcome.failed("COMMAND_NOT_FOUND", message, retryable=False)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\x00" not in value


def _is_variable(name: object, value: object) -> bool:
    is_name = isinstance(name, str) and _VARIABLE.fullmatch(name) and not name.startswith("TIMEBELL_")
    return bool(is_name) and _is_text(value)


def _invalid(message: str) -> InvalidInput:
    return InvalidInput(message, code="INVALID_TARGET_OPTIONS")
