"""When the plugin becomes active, and the import of fairseq on Python 3.14.

fairseq imports the folder in ``--user-dir`` under the folder's name. So this module imports nothing by the package's name.
"""

import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder

PACKAGE = "fairseq_lowrank"


class AfterImport(MetaPathFinder):
    """A finder that calls a function as soon as a package has been imported."""

    def __init__(self, package: str, call: Callable[[], object]) -> None:
        self.package, self.call = package, call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the package with a loader that calls the function at its end; None for other modules."""
        if name != self.package:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        if (spec := next(filter(None, others), None)) is None or spec.loader is None:
            return spec  # not installed, or a folder of this name without a package
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self.call()

        vars(spec.loader)["exec_module"] = exec_module
        return spec


def activate(name: str) -> None:
    """Import the plugin now if fairseq is imported, else as soon as it is.

    Args:
        name: the name under which this package is imported. fairseq derives it from the folder in ``--user-dir``.

    Raises:
        UserError: the package is imported under another name, where fairseq would register each model twice.
    """
    if name != PACKAGE:
        _refuse_name(os.path.dirname(os.path.abspath(__file__)))
    else:
        after_import("fairseq", functools.partial(importlib.import_module, f"{PACKAGE}.plugin"))


def after_import(package: str, call: Callable[[], object]) -> None:
    """Call a function as soon as a package has been imported: now, if it has been."""
    if package in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, AfterImport(package, call))


def deactivate() -> None:
    """Do not import the plugin when fairseq is imported."""
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not (isinstance(finder, AfterImport) and finder.package == "fairseq")
    ]


def import_models_and_tasks() -> None:
    """Import the folders whose contents register themselves with fairseq.

    fairseq imports them from a ``--user-dir`` only if the package was not imported before.
    """
    for folder in ("models", "tasks"):
        importlib.import_module(f"{PACKAGE}.{folder}")


def _refuse_name(folder: str) -> None:
    from .messages import FlagError, report

    target = os.path.realpath(folder)
    remedy = f"Rename the folder to {PACKAGE}."
    if os.path.basename(target) == PACKAGE:
        remedy = f"Use --user-dir {target}."
    error = FlagError("--user-dir", folder, f"the plugin's folder must be called {PACKAGE}", remedy)
    # The plugin, which ends commands in one line, cannot be imported under this name.
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], raised: BaseException, trace: types.TracebackType | None) -> None:
        if raised is not error:
            return hook(kind, raised, trace)
        raise SystemExit(report(error, os.path.basename(sys.argv[0])))

    sys.excepthook = excepthook
    raise error


def read_optional_types(interpret: Callable) -> Callable:
    """Wrap ``interpret_dc_type``: return X for the type ``X | None`` of an optional setting.

    fairseq recognises such a type by the text ``typing.Optional[X]``. On Python 3.14 the text of ``Optional[X]`` is ``X | None``.
    """

    @functools.wraps(interpret)
    def interpret_dc_type(field_type):
        return field_type.__args__[0] if isinstance(field_type, types.UnionType) else interpret(field_type)

    return interpret_dc_type


def import_fairseq() -> None:
    """Import fairseq with :func:`read_optional_types` in place, unless fairseq is imported already.

    ``fairseq/__init__.py`` imports every task, so the repair must come before that file is run. ``fairseq.dataclass`` needs no
    other part of fairseq.
    """
    if "fairseq" in sys.modules or (spec := importlib.util.find_spec("fairseq")) is None or spec.loader is None:
        return
    package = sys.modules["fairseq"] = importlib.util.module_from_spec(spec)
    try:
        from fairseq.dataclass import utils

        utils.interpret_dc_type = read_optional_types(utils.interpret_dc_type)
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["fairseq"]
        raise
