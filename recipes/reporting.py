"""What a recipe says at its end: one table, and one line of JSON for scripts."""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import flags
from rich.console import Console
from rich.table import Table

import comparing
import tfamp

Columns = Mapping[str, tuple[str, str]]


def define_common_flags(values: flags.FlagValues) -> None:
    """Adds the flags that every recipe has."""
    flags.DEFINE_list(
        "policy",
        "auto",
        "Dtype policy: auto, float32, mixed_bfloat16, mixed_float16, bfloat16 or "
        "float16. Several, separated by commas, are trained one after the other, "
        "each in a process of its own, and shown side by side.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "keep_float32",
        "default",
        "Layers that stay float32, as for tfamp.enable: default, none, or a list of "
        "class names and patterns.",
        flag_values=values,
    )
    flags.DEFINE_integer("seed", 0, "Seed of everything.", flag_values=values)
    flags.DEFINE_boolean("jit_compile", False, "Compile with XLA.", flag_values=values)
    flags.DEFINE_boolean(
        "smoke", False, "Two steps on synthetic data.", flag_values=values
    )
    flags.DEFINE_string(
        "output", None, "File for the line of JSON, too.", flag_values=values
    )
    flags.DEFINE_boolean(
        "summary", True, "Print the table and the line of JSON.", flag_values=values
    )
    comparing.define_flags(values)


def resolve(
    define_flags: Callable[[], flags.FlagValues],
    settings: flags.FlagValues | types.SimpleNamespace | None = None,
    *,
    seed: int | None = None,
    epochs: int | None = None,
) -> types.SimpleNamespace:
    """Returns the values of a recipe's flags, which unlike flags go to any process.

    Args:
        define_flags: Returns the recipe's flags.
        settings: Flags that were parsed, what this returned before, or None for the
            flags' defaults.
        seed: Instead of the seed of the settings.
        epochs: Instead of the epochs of the settings, or of the one of `--smoke`.
    """
    if settings is None:
        settings = define_flags()
        settings.mark_as_parsed()
    if isinstance(settings, flags.FlagValues):
        settings = types.SimpleNamespace(**settings.flag_values_dict())
        if settings.smoke:
            settings.epochs = 1
    own = {"seed": seed, "epochs": epochs}
    own = {name: value for name, value in own.items() if value is not None}
    return types.SimpleNamespace(**vars(settings) | own)


def run_recipe(
    title: str,
    settings: flags.FlagValues,
    argv: Sequence[str],
    train: Callable[[flags.FlagValues], dict[str, Any]],
    columns: Columns,
) -> int:
    """Does what the command line of a recipe asks for and returns its exit code.

    Args:
        title: Heading of the table.
        settings: The recipe's flags, not parsed yet.
        argv: The recipe's file and arguments.
        train: Trains under the one policy of the flags and returns what came of it.
        columns: Key of a result -> heading and number format of its column.
    """
    if {"--help", "-h"}.intersection(argv[1:]):
        print(f"{sys.modules[train.__module__].__doc__}{settings.get_help()}")
        return 0
    try:
        rest = settings(list(argv))[1:]
        if rest or not settings.policy:
            raise ValueError(
                f"Got arguments {tuple(rest)} and policies {tuple(settings.policy)}; "
                "expected flags only and a policy. See them with `--help`."
            )
        plain = resolve(lambda: settings, settings)
        comparing.check(plain)
        if plain.compare:
            return comparing.run(title, plain, argv, versions())
        if len(settings.policy) == 1:
            results = [train(settings)]
        else:
            results = train_each(argv[0], argv[1:], settings.policy)
    except (ConnectionError, ImportError, RuntimeError, ValueError) as error:
        print(f"{Path(argv[0]).stem}: {error}", file=sys.stderr)
        return 1
    except flags.Error as error:
        print(f"{Path(argv[0]).stem}: {error}. See `--help`.", file=sys.stderr)
        return 1
    _finish(title, columns, results, settings)
    return 0


def enable(settings: flags.FlagValues) -> Any:
    """Turns tfamp on as the flags say and returns its status."""
    keep_float32 = settings.keep_float32
    if keep_float32 in (["default"], ["none"]):
        keep_float32 = keep_float32[0]
    return tfamp.enable(policy=settings.policy[0], keep_float32=keep_float32)


def is_finite(model: keras.Model, *numbers: float) -> bool:
    """Whether every number and every weight of the model is finite."""
    return all(math.isfinite(number) for number in numbers) and all(
        np.isfinite(np.asarray(weight, dtype="float32")).all()
        for weight in model.get_weights()
    )


def speed(
    epoch_seconds: Sequence[float], num_examples: int, num_steps: int
) -> dict[str, float]:
    """Returns examples per second and milliseconds a step, of the median epoch.

    The first epoch, which traces and compiles, counts only if there is no other.

    Example:
        >>> speed([9.0, 2.0, 4.0, 2.0], num_examples=100, num_steps=10)
        {'examples_per_second': 50.0, 'step_milliseconds': 200.0}
    """
    seconds = statistics.median(epoch_seconds[1:] or epoch_seconds)
    return {
        "examples_per_second": round(num_examples / seconds, 1),
        "step_milliseconds": round(1000 * seconds / num_steps, 2),
    }


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on."""
    return {
        "tfamp": tfamp.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
    }


def train_each(script: str, argv: Sequence[str], policies: Sequence[str]) -> list[Any]:
    """Runs a recipe once for each policy, each in a fresh process.

    A fresh process is the only fair start: no traced function, no allocator
    state and no policy is left over from the run before.

    Args:
        script: The recipe's own file.
        argv: The recipe's arguments, of which `--policy`, `--output` are replaced.
        policies: What to train under.

    Raises:
        RuntimeError: A run failed; what it printed stands above.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for policy in policies:
            output = os.path.join(folder, "result.json")
            own = [f"--policy={policy}", f"--output={output}", "--nosummary"]
            command = [sys.executable, script, *argv, *own]
            code = subprocess.run(command, check=False).returncode
            if code != 0:
                raise RuntimeError(
                    f"The run under `--policy={policy}` ended with exit code {code}; "
                    "expected 0. Its error stands above; repeat it alone with "
                    f"`python {script} --policy={policy}`."
                )
            results.append(json.loads(Path(output).read_text()))
    return results


def _finish(
    title: str,
    columns: Columns,
    results: Sequence[dict[str, Any]],
    settings: flags.FlagValues,
) -> None:
    """Prints the table of all results and, as the last line, their JSON."""
    record = results[0] if len(results) == 1 else {"runs": list(results)}
    if len(results) > 1:
        record["finite"] = all(result["finite"] for result in results)
    text = json.dumps(record)
    if settings.output:
        Path(settings.output).write_text(text + "\n")
    if not settings.summary:
        return
    console = Console(highlight=False)
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for result in results:
        asked, policy = result["asked"], result["policy"]
        label = policy if asked == policy else f"{asked} = {policy}"
        cells = (format(result[key], spec) for key, (_, spec) in columns.items())
        table.add_row(label, *cells)
    console.print(table)
    for asked, reason in {r["asked"]: r["reason"] for r in results}.items():
        console.print(f"{asked}: {reason}", soft_wrap=True)
    print(text, flush=True)
