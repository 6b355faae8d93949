"""Which modules came with a package and which are the user's, and their versions."""

import functools
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

_KEYS = ("stdlib", "platstdlib", "purelib", "platlib")


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a module came with a package or with Python, and not from the user.

    tfamp counts as installed, wherever it lies.
    """
    if not module or module == "__main__":
        return False
    package = module.partition(".")[0]
    if package == "tfamp" or package in sys.builtin_module_names:
        return True
    folders = _folders()
    return any(os.path.realpath(place).startswith(folders) for place in _places(module))


@functools.cache
def version(module: str) -> str:
    """Returns the version of the package a module belongs to, "" if it has none.

    It is asked of what is installed, so that it is the same whether or not the
    package has been imported.
    """
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return ""
    for name in (package, *_distributions().get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(package), "__version__", ""))


@functools.cache
def own_code() -> str:
    """Returns a digest of tfamp's own code that makes elements.

    A clone that is worked on keeps its version.
    """
    found = hashlib.blake2b(digest_size=8)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def forget() -> None:
    """Forgets which modules are installed, after folders were added."""
    is_installed.cache_clear()
    _folders.cache_clear()


@functools.cache
def _folders() -> tuple[str, ...]:
    """Returns where packages are installed, the user's own folder among others."""
    found = {sysconfig.get_path(key) for key in _KEYS}
    found.update(site.getsitepackages(), [site.getusersitepackages()])
    return tuple(sorted(os.path.join(os.path.realpath(one), "") for one in found))


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


def _places(module: str) -> list[str]:
    """Returns the files or folders of a module, without importing it."""
    loaded = sys.modules.get(module)
    package = module.partition(".")[0]
    file = getattr(loaded, "__file__", None)
    if file:
        return [file]
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    if spec.origin in ("built-in", "frozen"):
        return [sysconfig.get_path("stdlib") + os.sep]
    if spec.origin:
        return [spec.origin]
    return [os.path.join(place, "") for place in spec.submodule_search_locations or ()]
