"""Seed small bugs into the code and report those that no test detects: `python -m scripts.mutate --budget 600`.

Each mutant runs in a process forked from this one, where an import hook compiles the changed module in memory. No file
of the product is written, so a killed run leaves no mutated source. Tests run on SQLite only, because a killed process
must not leave a database server.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import importlib.abc
import importlib.util
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from scripts.mutants import Mutant, find_mutants
from scripts.mutation_results import Equivalent, ModuleResult, read_equivalent, read_results, write_result

ROOT = Path(__file__).parents[1]
PARTS = ("engine", "store", "model", "tenancy", "api", "features", "targets", "http_client.py")
TEST_FOLDERS = ("unit", "conformance", "engine", "sim", "api", "push", "campaigns")  # in-process tests, fastest first
# Tests of modules that they neither import nor are named after: path below src -> paths below tests.
MORE_TESTS = {
    "timebell/store/jobs/dead_letters.py": ["api/test_operations.py", "api/test_jobs.py"],
    "timebell/api/dead_letters.py": ["api/test_operations.py"],
    "timebell/store/tenancy/tenant_limits.py": ["engine/test_tenant_limits.py", "api/test_tenants.py"],
    "timebell/tenancy/limits.py": ["engine/test_tenant_limits.py", "api/test_tenants.py"],
    "timebell/tenancy/keys.py": ["api/test_keys.py"],
    "timebell/tenancy/roles.py": ["api/test_users.py", "api/test_isolation.py"],
}
MIN_CPU_SECONDS, MIN_WALL_SECONDS, MAX_WALL_SECONDS, TIMEOUT_FACTOR = 10, 120, 3600, 10
KILLED, SURVIVED, KNOWN, UNTESTED = "killed", "survived", "known survivor", "untested"
MAX_CHECKED_CPU_SECONDS = 15  # `--check` runs modules whose tests are faster than this
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """Exit code of pytest in a forked process, None if it exceeded a limit; its times in seconds; its output."""

    code: int | None
    cpu: float
    wall: float
    output: str


class _MutantFinder(importlib.abc.MetaPathFinder):
    """Finds one module, with compiled code of its own."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self._name, self._path, self._code = name, path, code

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the specification of the mutated module."""
        if name != self._name:
            return None
        code = self._code

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                return code

        return importlib.util.spec_from_file_location(name, self._path, loader=Loader(name, str(self._path)))


def run_tests(root: Path, tests: list[Path], prepare: Callable[[], None], cpu: float, wall: float) -> Outcome:
    """Run pytest in a forked process after `prepare`, within limits in seconds."""
    with tempfile.TemporaryFile("w+") as output:
        started, child = time.monotonic(), os.fork()
        if child == 0:
            code = 99
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also if this process is killed
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(root)
                sys.path[:0] = [str(root / "src"), str(root)]
                resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 2))
                prepare()
                code = _run_pytest(tests)
            finally:
                os._exit(code)
        try:
            done = 0
            while not done and time.monotonic() - started < wall:
                done, status, usage = os.wait4(child, os.WNOHANG)
                time.sleep(0.02)
        finally:  # also on a signal: nothing that a test started survives this process
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        if not done:
            _, status, usage = os.wait4(child, 0)
        output.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return Outcome(
            None if code < 0 else code, usage.ru_utime + usage.ru_stime, time.monotonic() - started, output.read()
        )


def _run_pytest(tests: list[Path]) -> int:
    import pytest

    # With plain asserts, pytest's own import hook does not load modules of the product.
    options = ["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0"]
    return int(pytest.main([*map(str, tests), *options, "-k", "not postgres and not mariadb"]))


def preload(root: Path, tests: list[Path], wall: float) -> Outcome:
    """Run the tests without a mutant, and import the libraries that they use, so that forked processes have them."""
    with tempfile.NamedTemporaryFile("r") as names:

        def list_imports_at_exit() -> None:
            import pytest

            run = pytest.main

            def run_and_list(*args: Any) -> Any:
                result = run(*args)
                Path(names.name).write_text("\n".join(sys.modules))
                return result

            pytest.main = run_and_list

        outcome = run_tests(root, tests, list_imports_at_exit, cpu=600, wall=wall)
        own = {path.stem for path in [*(root / "src").iterdir(), *root.iterdir()]} | {"conftest", "__main__"}
        for name in names.read().split():
            if name.partition(".")[0] not in own and name not in sys.modules:
                try:
                    importlib.import_module(name)
                except Exception as error:  # some modules can only be imported in a certain order
                    print(f"not preloaded: {name}: {error}", file=sys.stderr)
    return outcome


def find_tests(root: Path, module: Path) -> list[list[Path]]:
    """Return the tests of a module in stages: unit tests named after it, those that import it, and all others.

    Tests in MORE_TESTS are tests of the module, too.
    """
    name = ".".join(module.relative_to(root / "src").with_suffix("").parts)
    listed = {root / "tests" / test for test in MORE_TESTS.get(module.relative_to(root / "src").as_posix(), [])}
    stages: list[list[Path]] = [[], [], []]
    for folder in TEST_FOLDERS:
        for test in sorted((root / "tests" / folder).rglob("test_*.py")):
            named = test.stem == f"test_{module.stem}" or test.stem.startswith(f"test_{module.stem}_")
            if named or test in listed or name in _imported_names(test):
                stages[2 if folder != "unit" else 0 if named else 1].append(test)
    return [tests for tests in stages if tests]


def _imported_names(test: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_module(root: Path, module: str, mutants: list[Mutant], end: float) -> Iterator[tuple[Mutant, str, float]]:
    """Run mutants until the time `end`; yield each with its status and the CPU time of the tests without a mutant.

    A stage of its tests runs if the mutant survives the stages before.
    """
    path = root / "src" / module
    source, stages = path.read_text(), find_tests(root, path)
    if not stages:
        yield from ((mutant, UNTESTED, 0.0) for mutant in mutants)
        return
    measured: list[Outcome] = []
    for mutant in mutants:
        if time.monotonic() >= end:
            return
        finder = _MutantFinder(module.removesuffix(".py").replace("/", "."), path, mutant.compile(source, str(path)))
        status = SURVIVED
        for stage, tests in enumerate(stages):
            if stage == len(measured) and not _measure(root, module, tests, end, measured):
                return
            outcome = _run_mutant(root, tests, finder, measured[stage], end)
            if outcome.code is None and time.monotonic() >= end:
                return
            if outcome.code != 0:
                status = KILLED
                break
        yield mutant, status, sum(base.cpu for base in measured)


def _measure(root: Path, module: str, tests: list[Path], end: float, measured: list[Outcome]) -> bool:
    """Append the result of the tests without a mutant; return whether they ended before the time `end`."""
    base = preload(root, tests, min(MAX_WALL_SECONDS, end - time.monotonic()))
    if base.code is None:
        return False
    if base.code != 0:
        raise SystemExit(f"The tests of {module} fail without a mutant:\n{base.output}")
    measured.append(base)
    return True


def _run_mutant(root: Path, tests: list[Path], finder: _MutantFinder, base: Outcome, end: float) -> Outcome:
    cpu, wall = base.cpu * TIMEOUT_FACTOR + MIN_CPU_SECONDS, base.wall * TIMEOUT_FACTOR + MIN_WALL_SECONDS
    wall = min(wall, end - time.monotonic())
    return run_tests(root, tests, lambda: sys.meta_path.insert(0, finder), cpu, wall)


def select_modules(root: Path, given: list[str], *, check: bool) -> list[str]:
    """Return the modules to run: those given; with `check` those with results and fast tests; otherwise all."""
    if given:
        return given
    if check:
        return [name for name, result in read_results(root).items() if result.cpu_seconds < MAX_CHECKED_CPU_SECONDS]
    product = root / "src" / "timebell"
    return [
        path.relative_to(root / "src").as_posix() for path in sorted(product.rglob("*.py"))
        if path.relative_to(product).parts[0] in PARTS and "migrations" not in path.parts
    ]  # fmt: skip


def run(root: Path, modules: list[str], end: float, equivalent: Equivalent, *, check: bool) -> Counter[str]:
    """Run the mutants of modules and print them; store the result of each module that was run completely.

    With `check` in random order, without storing, and known survivors do not count.
    """
    totals, stored = Counter[str](), read_results(root)
    for module in modules:
        mutants = [
            mutant for mutant in find_mutants((root / "src" / module).read_text())
            if mutant.id not in equivalent.get(module, {})
        ]  # fmt: skip
        if check:
            random.shuffle(mutants)
        known = stored[module].survived if check and module in stored else []
        result = ModuleResult()
        for mutant, status, result.cpu_seconds in run_module(root, module, mutants, end):
            status = KNOWN if status == SURVIVED and mutant.id in known else status
            totals[status] += 1
            result.killed += status == KILLED
            result.untested += status == UNTESTED
            result.survived += [mutant.id] if status == SURVIVED else []
            print(f"{status} src/{module}:{mutant.line} {mutant.id}", flush=True)
        result.cpu_seconds = round(result.cpu_seconds, 1)
        if result.total == len(mutants) > 0 and not check:
            write_result(root, module, result)
        if time.monotonic() > end:
            break
    return totals


def main(arguments: list[str] | None = None) -> int:
    """Run mutants; return 1 if one survived, 2 if none was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--check", action="store_true", help="run random mutants of the modules with stored results")
    parser.add_argument("--seed", default="", help="order of modules and mutants: any text, such as a commit")
    parser.add_argument("--modules", nargs="+", default=[], help="paths below src")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    random.seed(options.seed)
    root, end = options.root.resolve(), time.monotonic() + options.budget
    modules = select_modules(root, options.modules, check=options.check)
    if options.seed:
        random.shuffle(modules)
    totals = run(root, modules, end, read_equivalent(root), check=options.check)
    print(", ".join(f"{totals[status]} {status}" for status in (KILLED, SURVIVED, KNOWN, UNTESTED)))
    if not totals:
        print("No mutant was run: the tests take longer than the budget, or there are no modules.", file=sys.stderr)
        return 2
    return 1 if totals[SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
