"""What a recipe's `--compare` does: every seed under each policy, and a report."""

import functools
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
        "profile",
        False,
        "Show in the report of --compare what operations take, too.",
        flag_values=values,
    )


def check(settings: flags.FlagValues) -> None:
    """Checks that every flag that was given has an effect.

    Raises:
        ValueError: One would be ignored, or the report's folder is not new.
    """
    if not settings.compare:
        for name in ("report", "profile"):
            if settings[name].value != settings[name].default:
                raise ValueError(
                    f"Got `--{name}` without `--compare`; expected both, since the "
                    "report is of a comparison. Add for example `--compare=3`."
                )
        return
    if settings.keep_float32 != settings["keep_float32"].default:
        given = ",".join(settings.keep_float32)
        raise ValueError(
            f"`--keep_float32` is {given!r} with `--compare`; expected 'default', as "
            "a comparison is of policies. To leave the default rules out, add "
            "'+no_rules' to a policy, as in `--policy=float32,auto,auto+no_rules`."
        )
    if settings.report and _is_used(Path(settings.report)):
        raise ValueError(
            f"`--report` is {settings.report!r}, where something is already; expected "
            "a new or an empty folder. Pass another, or leave it out for a new one."
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
    build: Callable[..., Any],
    versions: dict[str, str],
) -> int:
    """Compares, writes the report, prints what it comes to, returns the exit code.

    Args:
        title: Heading of the report.
        settings: Values of the recipe's flags, checked.
        argv: The recipe's file and arguments.
        build: The recipe's; each process calls it with these settings.
        versions: What the result depends on.
    """
    recipe = Path(argv[0]).stem
    folder = Path(
        settings.report or f"reports/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    names = policies(settings)
    seeds = range(settings.seed, settings.seed + settings.compare)
    lines = Lines(len(names) * len(seeds))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            found = tfamp.compare(
                functools.partial(build, settings),
                policies=names,
                seeds=seeds,
                epochs=settings.epochs,
                profile_steps=_PROFILE_STEPS if settings.profile else 0,
                directory=folder / "runs",
                title=title,
                command=shlex.join(["python", *argv]),
                on_run=lines.show,
            )
    except KeyboardInterrupt:
        print(f"{recipe}: stopped before two runs could be compared.", file=sys.stderr)
        return _INTERRUPTED
    for warning in caught:
        print(f"{recipe}: {warning.message}", file=sys.stderr)
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
        total: Runs of the comparison.
        clock: Gives the time in seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
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
        seconds = (self._clock() - self._began) / self._done
        left = seconds * (self._total - self._done)
        print(
            f"[{self._done}/{self._total}] {run.policy}, seed {run.seed}: {text}  "
            f"({left:.0f} s left)",
            flush=True,
        )


def _rounded(value: float) -> float | None:
    """Returns a number for JSON, which has no NaN and no infinity."""
    return round(value, 4) if math.isfinite(value) else None


def _is_used(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
