"""Load the `Timebell` that `path/to/file.py` or `package.module:attr` refers to."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from timebell.app import Timebell
from timebell.errors import InvalidInput, TimebellError

T = TypeVar("T")


def load_app(reference: str) -> Timebell:
    """Import an app.

    Raises InvalidInput (APP_NOT_FOUND, APP_NOT_LOADABLE), or any TimebellError of the app's own calls.
    """
    return load_object(reference, Timebell, "app")


def load_object(reference: str, kind: type[T], default_name: str) -> T:
    """Import an object of a class from a reference with or without its name; the errors are those of `load_app`."""
    where, _, name = reference.rpartition(":") if ":" in reference else (reference, "", default_name)
    name = name or default_name
    module = _from_file(Path(where)) if where.endswith(".py") or "/" in where else _from_module(where)
    found = getattr(module, name, None)
    if isinstance(found, kind):
        return found
    others = [name for name, value in vars(module).items() if isinstance(value, kind)]
    raise InvalidInput(
        f"{where} has no {kind.__name__} named {name!r}.", code="APP_NOT_FOUND",
        fix=f"Did you mean {where}:{others[0]}?" if others else f"Define it: {name} = {kind.__name__}()",
    )  # fmt: skip


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(f"There is no file {path}.", code="APP_NOT_FOUND", fix="Use path/to/file.py or module:app.")
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
    except Exception as error:
        raise _import_error(str(path), error) from error
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
                fix="Run from the project folder, or use path/to/file.py.",
            ) from missing  # fmt: skip
        raise _import_error(name, missing) from missing
    except Exception as error:
        raise _import_error(name, error) from error


def _import_error(name: str, error: Exception) -> InvalidInput:
    """Describe the user's own error with the line it comes from, without frames of Timebell or importlib."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else name
    what = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}"
    is_missing = isinstance(error, ModuleNotFoundError)
    fix = f"Install it in the environment of this command: {sys.prefix}." if is_missing else ""
    return InvalidInput(f"{name} cannot be imported: {what} ({place}).", code="APP_NOT_LOADABLE", fix=fix)


def source_files(app_file: str) -> list[Path]:
    """Return the imported files of the user's own code: those below the folder of the app."""
    folder = Path(app_file).resolve().parent
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in files if file and file.endswith(".py")}
    return sorted(path for path in paths if folder in path.parents and "site-packages" not in path.parts)
