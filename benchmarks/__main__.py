"""`python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME` runs one."""

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import _page

FOLDER = Path(__file__).parent


def names() -> dict[str, str]:
    """Returns the first line of the text of each benchmark, by its name."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = text.splitlines()[0]
    return found | {"write_results": "Writes RESULTS.md from what is in results."}


def main(argv: Sequence[str]) -> int:
    """Lists or runs."""
    known = names()
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, known))
        print("usage: python -m benchmarks NAME [flags]\n")
        print("\n".join(f"  {name:{width}}  {text}" for name, text in known.items()))
        return 0
    if argv[0] not in known:
        expected = ", ".join(known)
        print(f"Unknown benchmark {argv[0]!r}; expected {expected}.", file=sys.stderr)
        return 2
    if argv[0] == "write_results":
        _page.write()
        return 0
    # TensorFlow reads it when it is imported, which a benchmark does.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    module = importlib.import_module(f"benchmarks.{argv[0]}")
    from benchmarks import _runner

    return _runner.run(argv, module)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
