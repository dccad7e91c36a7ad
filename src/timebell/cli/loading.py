"""From `path/to/file.py` or `package.module:attr` to the `Timebell` it defines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from timebell.app import Timebell
from timebell.errors import InvalidInput, TimebellError


def load_app(given: str) -> Timebell:
    """Import it. Raises InvalidInput (APP_NOT_FOUND, APP_BROKEN), or what the app's own calls raise."""
    where, _, attribute = given.rpartition(":") if ":" in given else (given, "", "app")
    module = _from_file(Path(where)) if where.endswith(".py") or "/" in where else _from_module(where)
    found = getattr(module, attribute or "app", None)
    if isinstance(found, Timebell):
        return found
    others = [name for name, value in vars(module).items() if isinstance(value, Timebell)]
    raise InvalidInput(
        f"{where} has no Timebell named {attribute!r}.", code="APP_NOT_FOUND",
        fix=f"Did you mean {where}:{others[0]}?" if others else f"Define it there: {attribute} = Timebell()",
    )  # fmt: skip


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"There is no file {path}.", code="APP_NOT_FOUND", fix="Give path/to/file.py or module:app.")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file.", code="APP_NOT_FOUND")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except TimebellError:
        raise
    except Exception as broken:
        raise _broken(str(path), broken) from broken
    return module


def _from_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except TimebellError:
        raise
    except ModuleNotFoundError as missing:
        if missing.name and (name == missing.name or name.startswith(f"{missing.name}.")):
            raise InvalidInput(
                f"There is no module {missing.name!r} here.", code="APP_NOT_FOUND",
                fix="Run it from the project's folder, or give path/to/file.py.",
            ) from missing  # fmt: skip
        raise _broken(name, missing) from missing
    except Exception as broken:
        raise _broken(name, broken) from broken


def _broken(name: str, broken: Exception) -> InvalidInput:
    """The user's own error: what it says and the line of theirs it comes from, not our frames."""
    if isinstance(broken, SyntaxError):
        place = f"{broken.filename}:{broken.lineno}"
    else:
        frames = [frame for frame in traceback.extract_tb(broken.__traceback__) if "importlib" not in frame.filename]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    what = f"{type(broken).__name__}: {getattr(broken, 'msg', None) or broken}"
    return InvalidInput(f"{name} cannot be imported: {what} ({place}).", code="APP_BROKEN")


def sources(app_file: str) -> list[Path]:
    """The files of the user's own code that are imported now: those below the app's folder."""
    folder = Path(app_file).resolve().parent
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if file and file.endswith(".py")}
    return sorted(path for path in paths if folder in path.parents and "site-packages" not in path.parts)
