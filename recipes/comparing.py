"""What a recipe's `--compare` does: every seed under each policy, and a report."""

import functools
import importlib
import json
import math
import shlex
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

import tfamp

_PROFILE_STEPS = 5
_TOLERANCE = 0.005
# Flags that may change from one part of a comparison to the next.
_FREE = ("compare", "output", "policy", "report", "resume", "seed", "summary")
_SETTINGS_FILE = "settings.json"
_INTERRUPTED = 130  # as shells have it


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags of comparisons."""
    flags.DEFINE_integer(
        "compare",
        0,
        "Train with so many seeds under float32 and the policy, each in a fresh "
        "process, and write a report; 0 trains once. Several policies are compared as "
        "they are.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_string(
        "report",
        None,
        "New folder for the report of --compare; else reports/<recipe>-<time>.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "resume",
        False,
        "Go on with the runs in the folder --report, after Ctrl-C or for more seeds.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "profile",
        False,
        "Show in the report of --compare what operations take, too.",
        flag_values=values,
    )


def leave_out(values: flags.FlagValues, flag: str, why: str) -> None:
    """Refuses `--compare` together with another flag.

    Args:
        values: The flags.
        flag: The other one.
        why: Why not, for the message.
    """
    flags.register_multi_flags_validator(
        [flag, "compare"],
        lambda given: not (given[flag] and given["compare"]),
        f"`--{flag}` came with `--compare`; expected one of them, as {why}. Leave one "
        "out",
        flag_values=values,
    )


def check(settings: types.SimpleNamespace) -> None:
    """Checks that every flag that was given has an effect.

    Args:
        settings: Values of the recipe's flags.

    Raises:
        ValueError: One would be ignored, or the folder is not new where it should be,
            or not old where it should be.
    """
    if not settings.compare:
        for name in ("report", "resume", "profile"):
            if getattr(settings, name):
                raise ValueError(
                    f"Got `--{name}` without `--compare`; expected both, since it is "
                    "about the report of a comparison. Add for example `--compare=3`."
                )
        return
    if settings.keep_float32 != ["default"]:
        given = ",".join(settings.keep_float32)
        raise ValueError(
            f"`--keep_float32` is {given!r} with `--compare`; expected 'default', as "
            "a comparison is of policies. To leave the default rules out, add "
            "'+no_rules' to a policy, as in `--policy=float32,auto,auto+no_rules`."
        )
    folder = settings.report and Path(settings.report)
    if settings.resume:
        before = folder and folder / _SETTINGS_FILE
        if not (before and before.is_file()):
            raise ValueError(
                f"`--resume` goes with `--report` {settings.report!r}; expected the "
                "folder of a comparison that this recipe began. Leave `--resume` out "
                "to begin one."
            )
        changed = _differences(json.loads(before.read_text()), _lasting(settings))
        if changed:
            raise ValueError(
                f"The runs in {settings.report!r} cannot go on: {'; '.join(changed)}. "
                "Expected the same flags. Set them as they were, or begin in another "
                "folder."
            )
    elif folder and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"`--report` is {settings.report!r}, where something is already; expected "
            "a new or an empty folder. Pass another, or add `--resume` to go on with "
            "its runs."
        )


def policies(settings: types.SimpleNamespace) -> list[str]:
    """Returns what is compared: as given, a policy alone with float32.

    Example:
        >>> policies(types.SimpleNamespace(policy=["auto"], jit_compile=False))
        ['float32', 'auto']
    """
    given = list(settings.policy)
    if len(given) == 1:
        given = ["float32", *given]
    if settings.jit_compile:
        given = [p if "xla" in p.split("+") else f"{p}+xla" for p in given]
    return given


def run(
    title: str,
    settings: types.SimpleNamespace,
    argv: Sequence[str],
    versions: dict[str, str],
) -> int:
    """Compares, writes the report, prints what it comes to, returns the exit code.

    Args:
        title: Heading of the report.
        settings: Values of the recipe's flags, checked.
        argv: The recipe's file, whose `build` each process calls, and arguments.
        versions: What the result depends on.
    """
    recipe = Path(argv[0]).stem
    folder = Path(
        settings.report or f"reports/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    names = policies(settings)
    seeds = range(settings.seed, settings.seed + settings.compare)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SETTINGS_FILE).write_text(json.dumps(_lasting(settings), indent=2))
    # Imported by name, it is imported by the processes of the runs too.
    module = importlib.import_module(recipe)
    num_runs = len(names) * len(seeds)
    lines = Lines(None if settings.resume else num_runs)
    go_on = f"`--resume --report={folder}` and the same flags do the rest"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            found = tfamp.compare(
                functools.partial(module.build, settings),
                policies=names,
                seeds=seeds,
                epochs=settings.epochs,
                tolerance=getattr(module, "TOLERANCE", _TOLERANCE),
                profile_steps=_PROFILE_STEPS if settings.profile else 0,
                directory=folder / "runs",
                resume=settings.resume,
                title=title,
                command=shlex.join(["python", *argv]),
                on_run=lines.show,
            )
    except KeyboardInterrupt:
        print(f"{recipe}: stopped, nothing to compare yet; {go_on}.", file=sys.stderr)
        return _INTERRUPTED
    for warning in caught:
        print(f"{recipe}: {warning.message}", file=sys.stderr)
    if len(found.runs) < num_runs:
        print(f"{recipe}: {go_on}.", file=sys.stderr)
    found.to_json(folder / "report.json")
    found.to_markdown(folder / "report.md")
    found.to_html(folder / "report.html")
    text = json.dumps(record(recipe, found, folder, versions))
    if settings.output:
        Path(settings.output).write_text(text + "\n")
    if settings.summary:
        print(found.table())
        print(f"Report: {folder / 'report.html'}")
        print(text, flush=True)
    return 0


def record(
    recipe: str, found: Any, folder: Path, versions: dict[str, str]
) -> dict[str, Any]:
    """Returns what a script wants to know of a comparison; null is what is unknown.

    The loss is the mean over seeds under the best policy.
    """
    runs = [run for run in found.runs if run.is_finished]
    losses = [run.final_metrics["loss"] for run in runs if run.policy == found.best]
    loss = sum(losses) / len(losses) if losses else math.nan
    speed = found.ratio("examples_per_second", found.best)
    ratio = {"estimate": speed.estimate, "low": speed.low, "high": speed.high}
    is_finite = len(runs) == len(found.runs) and all(
        run.num_nonfinite_weights == 0
        and all(map(math.isfinite, run.final_metrics.values()))
        for run in runs
    )
    return {
        "recipe": recipe,
        "policies": list(found.policies),
        "seeds": list(found.seeds),
        "verdict": found.verdict,
        "reason": found.verdicts[found.best].reason,
        "best": found.best,
        "reference": found.reference,
        "metric": found.metric,
        "examples_per_second_ratio": {
            key: _rounded(value) for key, value in ratio.items()
        },
        "loss": _rounded(loss),
        "report": str(folder / "report.html"),
        "finite": is_finite,
        "versions": versions,
    }


class Lines:
    """Prints a line for each finished run where no bar on a terminal shows them.

    Args:
        total: Runs to come, None if unknown.
        clock: Gives the time in seconds.
    """

    def __init__(
        self, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._done, self._clock = total, 0, clock
        self._began = clock()

    def show(self, run: Any) -> None:
        """Prints what a run came to, and about how long the others take."""
        self._done += 1
        if sys.stderr.isatty():
            return
        text = f"failed: {run.error}"
        if run.is_finished:
            metrics = (f"{key} {v:.4f}" for key, v in run.final_metrics.items())
            text = f"{run.examples_per_second:,.0f} examples/s  {'  '.join(metrics)}"
        place = f"[{self._done}]"
        if self._total is not None:
            seconds = (self._clock() - self._began) / self._done
            place = f"[{self._done}/{self._total}]"
            text = f"{text}  ({seconds * (self._total - self._done):.0f} s left)"
        print(f"{place} {run.policy}, seed {run.seed}: {text}", flush=True)


def _rounded(value: float) -> float | None:
    """Returns a number for JSON, which has no NaN and no infinity."""
    return round(value, 4) if math.isfinite(value) else None


def _lasting(settings: types.SimpleNamespace) -> dict[str, Any]:
    """Returns the values that all runs of a comparison have in common."""
    return {k: value for k, value in vars(settings).items() if k not in _FREE}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"`--{name}` was {before.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
