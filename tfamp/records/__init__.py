"""What everything is told in: records, findings, formats, units, files."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package."""

    def __getattr__(name: str) -> Any:
        module = sys.modules[package]
        if name not in homes:
            # It has a table of what people look for, and loads nothing for it.
            advice = importlib.import_module("tfamp")._advice(name)
            message = f"module {package!r} has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=module)
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    def __dir__() -> list[str]:
        module = vars(sys.modules[package])
        dunders = {name for name in module if name.startswith("__")}
        return sorted(dunders.union(homes, module.get("__all__", ())))

    return __getattr__, __dir__
