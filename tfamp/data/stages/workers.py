"""Parts of a source for the workers that train together, and how these divide it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data.sources import DATA
from tfamp.data.stages import Settings, Stage, has_role
from tfamp.machine.clusters import Cluster
from tfamp.records import checks

_Policy = tf.data.experimental.AutoShardPolicy


@dataclasses.dataclass(frozen=True)
class Shard(Stage):
    """Keeps each n-th element of the source, before anything is read of the others."""

    name: ClassVar[str] = "shard"
    num_shards: int
    index: int
    _: dataclasses.KW_ONLY
    cluster: Cluster | None = dataclasses.field(default=None, compare=False)
    is_even: bool = False

    def __post_init__(self) -> None:
        checks.positive_int("num_shards", self.num_shards)
        checks.positive_int("index", self.index, minimum=0)
        if self.index >= self.num_shards:
            raise ValueError(
                f"`index` is {self.index} with `num_shards` {self.num_shards}; "
                f"expected one from 0 to {self.num_shards - 1}. Workers count from 0."
            )
        needed = "processes" if self.num_shards > 1 else ""
        object.__setattr__(self, "needs_order", needed)

    def check_workers(self, num_workers: int) -> None:
        """Raises if other processes train together than those of the cluster."""
        if self.cluster is None or num_workers == self.num_shards:
            return
        told = self.cluster.source if self.cluster.workers else "an empty environment"
        raise ValueError(
            f"`.shard('auto')` makes {self.num_shards} part(s), as {told} says, and "
            f"TensorFlow trains with {num_workers} worker(s); expected one part for "
            "each: some elements would come several times, or never. Call "
            "`tfamp.distribute.strategy()` before `build`, or pass the numbers."
        )

    def _num_kept(self, length: int) -> int:
        """Returns how many of `length` elements this part has; raises if none may."""
        if length < (self.index + 1 if self.cluster is None else self.num_shards):
            raise ValueError(
                f"`.shard({self.num_shards}, {self.index})` of {length} elements is "
                "empty for a worker; expected an element for each. Use fewer workers, "
                "or a larger source."
            )
        whole, rest = divmod(length, self.num_shards)
        return whole + (not self.is_even and self.index < rest)

    def chosen(self, source: Any, settings: Settings) -> tf.Tensor:
        """Returns the positions of the part in a source, ascending, int64."""
        every = tf.range(self.index, source.num_examples, self.num_shards, tf.int64)
        return every[: self._num_kept(source.num_examples)]

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the elements of the part, in their order."""
        part, length = dataset.shard(self.num_shards, self.index), known_length(dataset)
        return part if length is None else part.take(self._num_kept(length))

    @property
    def setting(self) -> str:
        """Which part, and who told."""
        part = f"part {self.index} of {self.num_shards}"
        if self.cluster is None:
            return part
        even = ", all of one size, the rest dropped" if self.is_even else ""
        is_alone = self.num_shards == 1 and not self.cluster.workers
        told = "no cluster, so all elements" if is_alone else self.cluster.source
        return f"auto, by {told}: {part}{even}"


def num_workers(device_names: Sequence[str] | None = None) -> int:
    """Returns how many worker processes train together, this one included."""
    if device_names is None:
        device_names = [device.name for device in tf.config.list_logical_devices()]
    specs = [tf.DeviceSpec.from_string(name) for name in device_names]
    if any(spec.job == "ps" for spec in specs):
        return 1
    tasks = {(spec.job, spec.task) for spec in specs if spec.job in ("worker", "chief")}
    return max(1, len(tasks))


def check_order(source: Any, stages: Sequence[Stage]) -> None:
    """Raises where a stage goes by the places of elements that have several orders."""
    needs = {one.name: one.needs_order for one in stages if one.needs_order}
    if not needs:
        return
    order, name = source.order(), next(iter(needs))
    if order.varies:
        raise ValueError(
            f"`.{name}` got a dataset whose order differs in each pass, by "
            f"{order.varies} in it; expected one order: some would come twice, others "
            "never. Leave shuffling to `Pipeline.shuffle`, or pass the dataset's own "
            "`reshuffle_each_iteration=False` (`list_files` takes `shuffle=False`)."
        )
    if order.differs and "processes" in needs.values():
        raise _several_orders(f"`.shard` got {order.differs} without a seed")


def shard_policy(source: Any, steps: Sequence[Stage]) -> Any:
    """Returns how tf.distribute is to divide what comes out of steps."""
    policy = source.shard_policy
    for step in steps:  # which count on all elements of the source
        counts = has_role(step, "cuts", "draws") or getattr(step, "path", None)
        if counts and policy == _Policy.FILE:
            raise ValueError(
                f"`dataset` has the option `auto_shard_policy` FILE, and `.{step.name}`"
                " came with it; expected elements of all files there. Leave the option "
                "as it was: tf.distribute then divides the elements that come out."
            )
    if policy == _Policy.OFF or any(step.name == "shard" for step in steps):
        return _Policy.OFF
    loose = [
        f"`.{step.name}` has no seed"
        for step in steps
        if has_role(step, "seeded") and getattr(step, "seed", 0) is None
    ]
    if policy == DATA and (differs := source.order().differs):
        loose.append(f"`dataset` has {differs} without a seed")
    if loose and (workers := num_workers()) > 1:
        together = f"and {workers} worker processes train together"
        raise _several_orders(f"{loose[0]}, {together}")
    return policy


def _several_orders(found: str) -> ValueError:
    """Returns the error of processes that each have an order of their own."""
    return ValueError(
        f"{found}; expected one order in all of them: some elements would come twice, "
        "others never. Pass the same `seed=` everywhere, or add `.shard('auto')`."
    )
