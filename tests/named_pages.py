"""The pages of the documentation that errors, findings and triages of tfamp name."""

import ast
import typing
from pathlib import Path

from tfamp.numerics.lint import RULE_IDS
from tfamp.numerics.triage import Blamed, Triage
from tfamp.records import checks

ROOT = Path(__file__).parents[1]
# Where the name of a page is put together, from rules and causes.
MADE_OF = ("tfamp/numerics/lint.py", "tfamp/numerics/triage.py")


def named_pages() -> dict[str, set[str]]:
    """Returns the pages that calls of `see` and `address` name, by file."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tfamp").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("see", "checks.see", "checks.address")
                and name not in MADE_OF
            ):
                found.setdefault(name, set()).add(ast.literal_eval(node.args[0]))
    return found


def asked(address: str) -> str:
    """Returns the page that an address of the site is of."""
    assert address.startswith(f"{checks.SITE}/"), address
    return address.removeprefix(f"{checks.SITE}/").replace(".html", "", 1)


def triage_of(cause: str) -> Triage:
    """Returns a triage with nothing but a cause."""
    return Triage("model", cause, None, (), "")


USED = {
    *(page for found in named_pages().values() for page in found),
    *(f"lint#{rule}" for rule in RULE_IDS),
    *(asked(triage_of(cause).documentation) for cause in typing.get_args(Blamed)),
}
