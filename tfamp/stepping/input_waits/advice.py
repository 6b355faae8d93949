"""What to change about a pipeline or a step, most promising first."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfamp.data._elements import inputs_of, known_length
from tfamp.records.units import format_bytes, format_seconds, format_share
from tfamp.stepping.input_waits.verdict import MIN_GAIN, Judgement

# A cache of this size is not even asked about.
_SMALL_CACHE_BYTES = 2 * 2**30
# Images, rather than rows of a table.
_MIN_IMAGE_RANK = 3
# Steps this short are mostly Python and launching.
_SHORT_STEP_SECONDS = 0.005
# Starting epochs is worth a line above this part of the time.
_MUCH_STARTING = 0.05


@dataclasses.dataclass(frozen=True)
class InputFacts:
    """What is known about a dataset and a model without timing them.

    `total_bytes` is the size of an epoch as delivered, None if unknown; `threads` that
    of its own thread pool, None for TensorFlow's, which the model uses too.
    """

    total_bytes: int | None
    float_images: bool
    autotunes: bool
    threads: int | None
    on_cpu: bool
    jit_compiled: bool
    steps_per_execution: int


def facts_of(dataset: tf.data.Dataset, model: Any, *, batch_bytes: int) -> InputFacts:
    """Returns what advice is based on, for full batches of `batch_bytes`."""
    length = known_length(dataset)
    options = dataset.options()
    return InputFacts(
        total_bytes=None if length is None else length * batch_bytes,
        float_images=any(
            spec.dtype.is_floating and (spec.shape.rank or 0) > _MIN_IMAGE_RANK
            for spec in tf.nest.flatten(inputs_of(dataset.element_spec))
            if isinstance(spec, tf.TensorSpec)
        ),
        autotunes=options.autotune.enabled is not False,
        threads=options.threading.private_threadpool_size,
        on_cpu=not tf.config.list_logical_devices("GPU"),
        jit_compiled=bool(getattr(model, "jit_compile", False)),
        steps_per_execution=int(getattr(model, "steps_per_execution", 1) or 1),
    )


def advise(
    judgement: Judgement,
    facts: InputFacts,
    *,
    step_seconds: float,
    epoch_start_share: float | None,
) -> str:
    """Returns what to change, numbered, most promising first.

    `step_seconds` is a step with batches from memory, `epoch_start_share` the part of
    an epoch that its start takes, None if unknown.
    """
    if judgement.verdict == "contention":
        lines = [*_for_contention(facts)]
    elif judgement.verdict == "compute":
        lines = [*_for_compute(facts, step_seconds)]
    elif judgement.verdict == "input":
        lines = [*_for_input(judgement, facts)]
    else:
        lines = [
            "Measure longer (`seconds=30`) while nothing else runs on this machine."
        ]
        if judgement.gain_low > MIN_GAIN:
            # Something is to be gained; only by what is not sure.
            lines += _for_input(judgement, facts)
    if epoch_start_share is not None and epoch_start_share > _MUCH_STARTING:
        lines.append(
            f"Each epoch starts with {format_share(epoch_start_share)} of its time: "
            "smaller shuffle buffers fill sooner, and a cache starts at once."
        )
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, start=1))


def _for_input(judgement: Judgement, facts: InputFacts) -> Iterator[str]:
    if judgement.needs_prefetch:
        yield (
            "End the pipeline with `.prefetch(2)`: tried here, it regained most of "
            "what is lost."
        )
    yield from _less_work(facts)
    yield (
        "Map with `num_parallel_calls` of the number of cores, and after `.batch` "
        "where the function can take a batch; parse records and CSV by the batch. "
        "`tfamp.data.Pipeline` does both."
    )
    if facts.autotunes:
        yield (
            "Try fixed numbers (`options.autotune.enabled = False`): autotuning may "
            "start with too few threads and stall the end of an epoch."
        )


def _less_work(facts: InputFacts) -> Iterator[str]:
    """Yields what makes each batch cheaper."""
    if facts.float_images:
        yield (
            "Deliver images as uint8 and scale them in the model: the cast on the CPU "
            "is most of the cost of a decoded batch, and a batch is 4 times smaller."
        )
    if facts.total_bytes is None:
        size = ", in memory if it fits, else in a file on an SSD"
    else:
        size = (
            f"; an epoch as delivered is {format_bytes(facts.total_bytes)}, in memory"
        )
        if facts.total_bytes > _SMALL_CACHE_BYTES:
            size += " or in a file on an SSD"
    yield (
        "Cache what is the same each epoch: `.cache()` before shuffling and "
        f"augmenting{size}."
    )


def _for_contention(facts: InputFacts) -> Iterator[str]:
    yield from _less_work(facts)
    if facts.threads is None or facts.threads > 1:
        than = "there are cores" if facts.threads is None else f"its {facts.threads}"
        yield (
            f"Give the input fewer threads than {than}, so that it cannot push the "
            "model aside: `options.threading.private_threadpool_size`."
        )
    if facts.on_cpu:
        yield (
            "Model and input share these cores: cheaper preprocessing helps both, "
            "faster preprocessing by more threads neither."
        )
    else:
        yield "Move augmentation and scaling into the model, onto the device."


def _for_compute(facts: InputFacts, step_seconds: float) -> Iterator[str]:
    yield "Leave the pipeline as it is: a perfect one would gain less than 10 %."
    if step_seconds < _SHORT_STEP_SECONDS:
        single = facts.steps_per_execution == 1
        more = ", or `steps_per_execution=16` in `compile`" if single else ""
        yield (
            f"A step takes {format_seconds(step_seconds)}, much of it launching: use "
            f"larger batches{more}."
        )
    fused = "" if facts.jit_compiled else ", `compile(jit_compile=True)` fuses it"
    yield (
        "Make the step cheaper: `tfamp.enable(policy='auto')` picks the fastest "
        f"precision of this machine{fused}."
    )
