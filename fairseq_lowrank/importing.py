"""Import fairseq on Python 3.14, where fairseq-fixed 0.12.3.1 fails before it reads ``--user-dir``."""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable


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
    if "fairseq" in sys.modules or (spec := importlib.util.find_spec("fairseq")) is None:
        return
    package = sys.modules["fairseq"] = importlib.util.module_from_spec(spec)
    try:
        from fairseq.dataclass import utils

        utils.interpret_dc_type = read_optional_types(utils.interpret_dc_type)
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["fairseq"]
        raise
