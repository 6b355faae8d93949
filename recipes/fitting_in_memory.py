"""What a recipe's `--max_memory` does: smaller batches, and updates as before."""

import math
import re
import types
from collections.abc import Callable
from typing import Any

import keras
from absl import flags

import comparing
import tfamp

# Sizes that matrix units like; the smallest batch that is tried.
_MULTIPLE = 8
_UNITS = {
    **{"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30},
}


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags `--max_memory` and `--accumulation_steps`."""
    flags.DEFINE_string(
        "max_memory",
        None,
        "Memory that a step may take, such as 2GiB, 500MB or a number of bytes, beside "
        "what the process holds anyway. Where the predicted peak is above, batches are "
        "made smaller and added up, so that an update has as many examples as before.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "accumulation_steps",
        1,
        "Batches in an update.",
        lower_bound=1,
        flag_values=values,
    )
    comparing.leave_out(
        values, "max_memory", "each policy would be trained in batches of another size"
    )


def fitted(
    settings: types.SimpleNamespace, build: Callable[[Any], tuple[Any, ...]]
) -> tuple[types.SimpleNamespace, dict[str, Any]]:
    """Returns the settings with a batch that fits, and what the line of JSON gets.

    Args:
        settings: Values of the flags.
        build: The recipe's own function; it returns a compiled model and its data.

    Raises:
        ValueError: The flag is no number of bytes, or not even eight examples fit.
    """
    if settings.max_memory is None:
        return settings, {}
    limit = num_bytes(settings.max_memory)
    before = settings.batch_size * settings.accumulation_steps
    first = estimate = _estimate(build, settings)
    # What is chosen is traced again: gradients that are added up take memory too, and
    # far from a size that was traced a prediction is a guess.
    while estimate.peak_bytes > limit:
        largest = _largest(estimate, limit, settings.max_memory)
        size, steps = split(largest, before)
        chosen = {"batch_size": size, "accumulation_steps": steps}
        settings = types.SimpleNamespace(**vars(settings) | chosen)
        estimate = _estimate(build, settings)
    if estimate is not first:
        size, steps = settings.batch_size, settings.accumulation_steps
        print(
            f"--max_memory={settings.max_memory}: a step was predicted to take "
            f"{first.peak_bytes:,} bytes, and takes {estimate.peak_bytes:,} in batches "
            f"of {size}; {steps} of them make an update of {size * steps} examples "
            f"(before: {before}).",
            flush=True,
        )
    return settings, {
        "predicted_peak_bytes": estimate.peak_bytes,
        "batch_size": settings.batch_size,
        "accumulation_steps": settings.accumulation_steps,
    }


def accumulating(
    optimizer: keras.optimizers.Optimizer, steps: int
) -> keras.optimizers.Optimizer:
    """Returns an optimizer that updates once in so many batches; for one, itself.

    The loss is scaled where layers compute in float16.
    """
    if steps == 1:
        return optimizer
    is_half = keras.config.dtype_policy().compute_dtype == "float16"
    return tfamp.LossScaleOptimizer(
        optimizer,
        initial_scale=2.0**15 if is_half else 1.0,
        dynamic=is_half,
        accumulation_steps=steps,
    )


def num_updates(num_batches: int, steps: int) -> int:
    """Returns how often the weights change in an epoch, the rest of it included.

    Example:
        >>> num_updates(10, 1), num_updates(10, 4)
        (10, 3)
    """
    return math.ceil(num_batches / steps)


def split(largest: int, effective: int) -> tuple[int, int]:
    """Returns the size and the number of batches that make up an update.

    The largest multiple of 8 that goes into the update without a rest; where there is
    none, as few batches as can be, that together are a little more.

    Args:
        largest: The most examples that fit, a multiple of 8.
        effective: Examples of an update, more than that.

    Example:
        >>> split(largest=40, effective=64), split(largest=96, effective=100)
        ((32, 2), (56, 2))
    """
    for size in range(largest, 0, -_MULTIPLE):
        if effective % size == 0:
            return size, effective // size
    steps = math.ceil(effective / largest)
    return _MULTIPLE * math.ceil(effective / steps / _MULTIPLE), steps


def num_bytes(text: str) -> int:
    """Returns the bytes that a text such as "2GiB" stands for.

    Raises:
        ValueError: It is something else.

    Example:
        >>> num_bytes("1.5GiB"), num_bytes("500 MB")
        (1610612736, 500000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    factor = _UNITS.get(found[2]) if found else None
    number = int(float(found[1]) * factor) if found and factor else 0
    if number < 1:
        raise ValueError(
            f"`--max_memory` is {text!r}; expected a number of bytes, alone or with a "
            "unit from kB to GB or from KiB to GiB. Write for example "
            "`--max_memory=2GiB`."
        )
    return number


def _estimate(
    build: Callable[[Any], tuple[Any, ...]], settings: types.SimpleNamespace
) -> Any:
    """Returns what a step holds; none is run."""
    model, data, *_ = build(settings)
    return tfamp.estimate_memory(model, settings.batch_size, data=data)


def _largest(estimate: Any, limit: int, text: str) -> int:
    """Returns the most examples that fit, a multiple of 8."""
    try:
        return int(estimate.largest_batch(limit, multiple_of=_MULTIPLE, resident=False))
    except ValueError as error:
        raise ValueError(
            f"`--max_memory` is {text!r}, too little for a batch of {_MULTIPLE}: "
            f"{error}"
        ) from error
