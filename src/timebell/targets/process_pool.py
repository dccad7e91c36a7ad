"""Worker processes for plain handlers that use much CPU time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from subprocess import DEVNULL, Popen
from threading import Lock
from typing import TYPE_CHECKING, Any

from timebell.targets.exceptions import ProcessDied, attach_description
from timebell.targets.function_path import FunctionPath
from timebell.targets.thread_pool import NotStarted, ThreadPool

if TYPE_CHECKING:
    from timebell.targets.arrived import Arrived


QUEUE_AHEAD_SECONDS = 0.1
"""Calls are accepted ahead of a free process if one is expected within this time, so that it has a call at once."""


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class ProcessStarted(NotStarted):
    """No process was idle, so one was started, which the call may use now."""


class ProcessPool:
    """Runs calls in up to as many worker processes as there are cores, started on demand.

    Each process belongs to a thread while it runs a call. Processes are started as new programs, without fork: they
    share no locks or connections with the node, and do not run its main module.
    """

    def __init__(self, monotonic: Callable[[], float], modules: Sequence[str]) -> None:
        self._monotonic = monotonic
        self._modules = modules
        """Imported by each process before its first call."""
        self._threads = ThreadPool(available_cores(), monotonic, QUEUE_AHEAD_SECONDS)
        self._idle: list[_Process] = []
        self._lock = Lock()
        """Protects the assignment of processes to calls, and the next two fields."""
        self._all: set[_Process] = set()
        self._is_shut_down = False

    def capacity(self) -> int:
        """Return the number of calls to accept: one per process, plus those expected to wait only briefly for one."""
        return self._threads.capacity()

    async def call(self, path: FunctionPath, event: Arrived) -> Any:
        """Call a function in a process; return its result, or raise its exception.

        If the caller is cancelled, the process is killed. Raises NotStarted if no process became free in time, or if
        the lease of the attempt has expired, and ProcessDied.
        """
        call = _Call(path, event)
        while True:
            with suppress(ProcessStarted):
                return await self._run_in_thread(call)

    async def _run_in_thread(self, call: _Call) -> Any:
        running = self._threads.call(partial(self._run, call))
        try:
            return await asyncio.shield(running)  # the thread ends when it notices that the process has
        except asyncio.CancelledError:
            with self._lock:
                call.is_cancelled = True
                if call.process is not None:
                    call.process.kill()
            running.add_done_callback(lambda future: future.cancelled() or future.exception())  # mark as retrieved
            raise

    def shutdown(self) -> None:
        """Accept no more calls, and kill all processes."""
        with self._lock:
            self._is_shut_down = True
            for process in self._all:
                process.kill()
            idle, self._idle = self._idle, []
        self._threads.shutdown()
        for process in idle:
            self._discard(process)

    def _run(self, call: _Call) -> Any:
        """Run a call in this thread, until its process has finished it or has ended."""
        process = self._take_idle_process()
        if process is None:  # a call of its own, whose duration says nothing about the duration of handlers
            self._idle.append(self._start_process())
            raise ProcessStarted
        with self._lock:
            handle = call.event._attempt
            lease_expired = handle is not None and self._monotonic() >= handle.lease_until
            if call.is_cancelled or lease_expired:  # while it waited
                self._idle.append(process)
                raise NotStarted
            call.process = process
        try:
            return process.run(call)
        finally:
            with self._lock:
                call.process = None
                if not process.is_killed:
                    self._idle.append(process)
            if process.is_killed:
                self._discard(process)

    def _take_idle_process(self) -> _Process | None:
        with suppress(IndexError):
            while not (process := self._idle.pop()).is_alive():
                self._discard(process)
            return process
        return None

    def _start_process(self) -> _Process:
        """Return a new process that is ready."""
        try:
            process = _Process()
        except OSError as error:  # for example, out of memory or processes
            raise ProcessDied(f"A worker process could not be started: {error}.") from error
        with self._lock:
            self._all.add(process)
            if self._is_shut_down:
                process.kill()
        try:
            process.prepare(self._modules)
        except ProcessDied:
            self._discard(process)
            raise
        return process

    def _discard(self, process: _Process) -> None:
        """Kill a process and what it has started, and wait for its end."""
        process.kill()
        process.close()
        with self._lock:
            self._all.discard(process)


class _Call:
    """A call, and the process that runs it."""

    def __init__(self, path: FunctionPath, event: Arrived) -> None:
        self.path, self.event = path, event
        self.process: _Process | None = None
        self.is_cancelled = False


class _Process:
    """A worker process, which leads a process group of its own, and the connection to it."""

    def __init__(self) -> None:
        self.is_killed = False
        self._connection, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            program = (
                f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; "
                f"from timebell.targets.process_worker import serve; serve({descriptor})"
            )
            self._popen = Popen(  # noqa: S603 - this Python, with a program of ours
                [sys.executable, "-c", program], stdin=DEVNULL, pass_fds=[descriptor], start_new_session=True
            )

    def prepare(self, modules: Sequence[str]) -> None:
        """Import modules in the process. Raises ProcessDied."""
        loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
        levels = {
            logger.name: logger.level for logger in loggers if isinstance(logger, logging.Logger) and logger.level
        }
        self._send(modules, levels)
        self._receive()

    def run(self, call: _Call) -> Any:
        """Run a call; return its result, or raise its exception, or ProcessDied."""
        event = call.event
        self._send(call.path, replace(event, state=None, _attempt=None))
        while True:
            match self._receive():
                case "progress", fraction, text:
                    if event._attempt is not None:
                        event._attempt.report_progress(fraction, text)
                case "log", record:
                    logger = logging.getLogger(record.name)
                    if logger.isEnabledFor(record.levelno):
                        logger.handle(record)
                case "returned", result:
                    return result
                case "unstorable", type_name:
                    return type(type_name, (), {})()  # the warning on the job names the type
                case "raised", portable, description:
                    error = portable if isinstance(portable, BaseException) else portable()
                    attach_description(error, *description)
                    raise error

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        """Kill the process and what it has started. Its memory and connections are gone when `close` returns."""
        self.is_killed = True
        if self._popen.returncode is None:  # otherwise another process may have its id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for the end of the killed process."""
        self._popen.wait()
        self._connection.close()

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._died() from None

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> ProcessDied:
        self.kill()  # also kills the programs that the process has started; its own exit status is kept
        status = self._popen.wait()
        ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return ProcessDied(f"The worker process {ending}.")
