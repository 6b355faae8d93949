"""Breaks one line of the package at a time and asks whether the suite notices.

    python -m tests.suite.mutants                  what `make test` runs
    python -m tests.suite.mutants --whole          every case of every test
    python -m tests.suite.mutants --only cache     some, by their names or files

Each mutant is a line of `tests/mutants/*.json`: what stands in a file, what takes its
place, and the tests that noticed it when it was last tried. Those run first, then all
tests that reach the file through imports, the nearest first, up to the first failure.
A mutant that nothing notices is a test that is missing. It works on copies of the
clone; exit status 1 if a mutant lives.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.suite.imports import ROOT

FOLDER = ROOT / "tests" / "mutants"
LIMIT_SECONDS = 900
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py::[^\s\[]+)", re.MULTILINE)
# Of pytest: tests failed, or could not be collected.
_KILLED = (1, 2)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One line of the package, changed so that it is wrong.

    Args:
        name: What is broken, in a sentence.
        file: Path from the root of the repository.
        was: Text that stands in the file once.
        becomes: What takes its place.
        killers: Tests that noticed it, by the names that pytest takes.
    """

    name: str
    file: str
    was: str
    becomes: str
    killers: tuple[str, ...] = ()

    def apply(self, root: Path) -> str:
        """Breaks the file below a folder and returns its text as it was.

        Raises:
            ValueError: The text does not stand in the file just once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.was) != 1:
            raise ValueError(
                f"Mutant {self.name!r}: {self.was!r} stands {text.count(self.was)} "
                f"times in {self.file}; expected once. Choose it anew."
            )
        path.write_text(text.replace(self.was, self.becomes), encoding="utf-8")
        return text


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Args:
        mutant: The mutant.
        killer: The test that failed, "" if none did.
        note: What else is to be said, as that a run took too long.
    """

    mutant: Mutant
    killer: str
    note: str = ""


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Returns all mutants, in the order of the files."""
    return [
        Mutant(**(entry | {"killers": tuple(entry.get("killers", ()))}))
        for path in sorted(folder.glob("*.json"))
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def record(outcomes: Sequence[Outcome], folder: Path = FOLDER) -> None:
    """Writes the test that noticed each mutant into the table."""
    killers = {o.mutant.name: o.killer for o in outcomes}
    for path in sorted(folder.glob("*.json")):
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            if "::" in killers.get(entry["name"], ""):  # no error of collection
                entry["killers"] = [killers[entry["name"]]]
        text = json.dumps(entries, indent=1, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")


def copy_to(folder: Path) -> None:
    """Copies the clone's files, new ones among them, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(root: Path, seed: str, whole: bool, arguments: Sequence[str]):
    """Runs pytest in a copy and returns its status and the first test that failed."""
    choice = ["--whole"] if whole else [f"--seed={seed}"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    # It holds that every mutant's text is in place, which that of this one is not.
    command.append("--deselect=tests/suite_tools_test.py")
    try:
        done = subprocess.run(
            [*command, "--tb=no", *choice, *arguments],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    failed = _FAILED.search(done.stdout)
    return done.returncode, failed[1] if failed else ""


def judged(mutant: Mutant, root: Path, seed: str, whole: bool) -> Outcome:
    """Tries one mutant in a copy of the clone, which is as before afterwards."""
    before = mutant.apply(root)
    try:
        attempts = [list(mutant.killers)] if mutant.killers else []
        for arguments in [*attempts, [f"--near={mutant.file}"]]:
            status, killer = run_tests(root, seed, whole, arguments)
            if status is None:
                return Outcome(mutant, "", f"took over {LIMIT_SECONDS} s")
            if status in _KILLED:
                return Outcome(mutant, killer or "collection")
    finally:
        (root / mutant.file).write_text(before, encoding="utf-8")
    return Outcome(mutant, "")


def main(argv: Sequence[str]) -> int:
    """Tries the mutants, prints a line for each and the number of those that died."""
    parser = argparse.ArgumentParser(description="Breaks lines and runs the tests.")
    parser.add_argument("--only", default="", help="part of a name or a file")
    parser.add_argument("--whole", action="store_true", help="every case")
    parser.add_argument("--seed", default="mutants", help="of the chosen cases")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv[1:])
    # Shells start what runs in the background with Ctrl-C ignored, which tests of it
    # would inherit and fail by, whatever the mutant.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mutants = [m for m in load() if options.only in f"{m.name} {m.file}"]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for index in range(options.jobs):
            copy_to(Path(folder, str(index)))
            copies.put(Path(folder, str(index)))

        def judge(mutant: Mutant) -> Outcome:
            root = copies.get()
            try:
                return judged(mutant, root, options.seed, options.whole)
            finally:
                copies.put(root)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for future in concurrent.futures.as_completed(
                [pool.submit(judge, mutant) for mutant in mutants]
            ):
                outcomes.append(found := future.result())
                said = found.killer or f"LIVES {found.note}"
                share = f"{len(outcomes)} of {len(mutants)}"
                print(f"{share:>9}  {found.mutant.name}: {said}", flush=True)
    record(outcomes)
    killed = sum(bool(outcome.killer) for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} mutants noticed")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
