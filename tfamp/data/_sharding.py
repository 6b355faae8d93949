"""Which worker process takes which elements, and what would lose or double some.

tf.distribute lets every worker run the whole pipeline and keep each n-th batch of it,
so all of them have to bring the elements in one order. `Shard` divides the source
instead: then a worker reads and shuffles nothing but its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data._sources import RandomAccess, Source
from tfamp.data._stages import Settings, Stage
from tfamp.data.cache.stage import FileCache

_Policy = tf.data.experimental.AutoShardPolicy
# Stages that bring elements in an order that a seed decides.
_ORDERING = ("shuffle", "balance", "weights")
# Stages that count on all elements of the source.
_COUNTING = ("subset", "balance", "weights", "shard")
_WORKER_JOBS = ("worker", "chief")


@dataclasses.dataclass(frozen=True)
class Shard(Stage):
    """Keeps each n-th element of the source, before anything is read of the others.

    Attributes:
        num_shards: Parts that the source is divided into.
        index: Which part, from 0.
    """

    rank: ClassVar[int] = 6
    name: ClassVar[str] = "shard"
    num_shards: int
    index: int

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the part is known to be empty."""
        length = known_length(dataset)
        if length is not None:
            self._check_length(length)

    def chosen(self, source: RandomAccess) -> tf.Tensor:
        """Returns the positions of the part, ascending, int64.

        Raises:
            ValueError: It is empty.
        """
        self._check_length(source.num_examples)
        return tf.range(self.index, source.num_examples, self.num_shards, tf.int64)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the elements of the part, in their order."""
        return dataset.shard(self.num_shards, self.index)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return (
            f"part {self.index} of {self.num_shards}",
            f"each {self.num_shards}th element; tf.distribute divides no further",
        )

    def _check_length(self, length: int) -> None:
        if length <= self.index:
            raise ValueError(
                f"`.shard({self.num_shards}, {self.index})` of {length} elements is "
                "empty; expected an element for each shard. Use fewer workers, or a "
                "larger source."
            )


def num_workers(device_names: Sequence[str] | None = None) -> int:
    """Returns how many worker processes train together with this one, itself included.

    Under a parameter server it is 1: there every worker brings elements of its own.

    Args:
        device_names: Full names of all devices; None to ask TensorFlow, which knows
            those of other processes once a strategy was made.

    Example:
        >>> name = "/job:worker/replica:0/task:{}/device:CPU:0"
        >>> num_workers([name.format(0), name.format(1)])
        2
        >>> num_workers(["/device:CPU:0", "/device:CPU:1"])
        1
    """
    if device_names is None:
        device_names = [device.name for device in tf.config.list_logical_devices()]
    specs = [tf.DeviceSpec.from_string(name) for name in device_names]
    if any(spec.job == "ps" for spec in specs):
        return 1
    tasks = {(spec.job, spec.task) for spec in specs if spec.job in _WORKER_JOBS}
    return max(1, len(tasks))


def shard_policy(source: Source, steps: Sequence[Stage]) -> Any:
    """Returns how tf.distribute is to divide what comes out of a plan.

    Raises:
        ValueError: Elements would be lost or doubled, in these processes or in any.
    """
    names = [step.name for step in steps]
    policy = source.shard_policy
    counting = [
        step.name
        for step in steps
        if step.name in _COUNTING or isinstance(step, FileCache)
    ]
    if policy == _Policy.FILE and counting:
        raise ValueError(
            f"`dataset` has the option `auto_shard_policy` FILE, and `.{counting[0]}` "
            "came with it; expected elements of all files there. Leave the option as "
            "it was: tf.distribute then divides the elements that come out."
        )
    if "shard" in names or policy == _Policy.OFF:
        return _Policy.OFF
    workers = num_workers()
    loose = [step.name for step in steps if _is_loose(step)] if workers > 1 else []
    if loose:
        raise ValueError(
            f"`.{loose[0]}` has no seed, and {workers} worker processes train "
            "together; expected one order in all of them, since each takes its share "
            "by position: some elements would come twice, others never. Pass the same "
            f"`seed=` everywhere, or add `.shard({workers}, index)` with the worker's "
            "index."
        )
    return policy


def without_length(dataset: tf.data.Dataset, steps: Sequence[Stage]) -> tf.data.Dataset:
    """Returns a plan's dataset without a length that `fit` would take for its steps.

    A part of one of n workers has an n-th of the batches. tf.distribute cuts these
    into n, so there are n times as many steps; `fit` would stop after the length.

    Args:
        dataset: What the plan made.
        steps: The plan's.
    """
    is_part = any(step.name == Shard.name for step in steps)
    if not is_part or num_workers() == 1:
        return dataset
    return dataset.filter(lambda *parts: True)


def _is_loose(step: Stage) -> bool:
    """Whether a step's order differs from process to process."""
    sampler = getattr(step, "sampler", step)
    return step.name in _ORDERING and getattr(sampler, "seed", 0) is None


def make_shard(num_shards: int, index: int) -> Shard:
    """Returns the stage of `Pipeline.shard`, its numbers checked already.

    Raises:
        ValueError: `index` is none of a part's.
    """
    if index >= num_shards:
        raise ValueError(
            f"`index` is {index} with `num_shards` {num_shards}; expected one from 0 "
            f"to {num_shards - 1}. Workers count from 0."
        )
    return Shard(num_shards, index)
