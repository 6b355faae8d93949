"""Which examples come, in which order, and which together: verbs of `Pipeline`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfamp.data.pipeline_sources import PipelineSources
from tfamp.data.stages import Shuffle
from tfamp.data.stages.batches import Bucket
from tfamp.data.stages.draws import Balance, Subset, Weights
from tfamp.data.stages.filter import Filter
from tfamp.data.stages.sequences import DEFAULT_MAX_SHAPES, LENGTH_MULTIPLE
from tfamp.data.stages.workers import Shard, cluster_shard
from tfamp.data.statistics import Statistics
from tfamp.records import checks

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True)
class PipelineSelection(PipelineSources):
    """The verbs that choose, weigh, order and group examples."""

    def subset(
        self,
        size: int | float,
        *,
        stratify: Callable[..., Any] | str | bool | None = None,
        seed: int = 0,
    ) -> "Self":
        """Keeps a part of the examples, the same in every epoch and process.

        Args:
            size: How many, or which share, above 0 and below 1.
            stratify: None for a uniform draw; "target" keeps the proportions of the
                target's classes, a key or a function those of other classes.
            seed: Same seed, same subset.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `size` is no number, or `stratify` none of those.
            ValueError: `size` is 0 or less, or a share of 1 or more.
        """
        return self._with(Subset(size, stratify=stratify, seed=seed))

    def shard(self, num_shards: int | str, index: int | None = None) -> "Self":
        """Keeps the part of one worker of several that train together.

        Without it every worker of `tf.distribute` reads and decodes everything and
        keeps its share of the batches: exact if all have the same order, so `build`
        then wants a seed where there is a shuffle, and the same global seed. With it
        a worker reads, caches, shuffles and samples nothing but each n-th element of
        the source, from `index` on, seeds may differ, and tf.distribute is told to
        divide no further. Parts differ by at most one element; a subset is drawn
        before, and the weights of `.weights` are those of the part.

        All workers make equally many steps: one that has no more elements brings
        empty batches to the last steps, and no element is lost or doubled. Batches
        that drop their remainder could be more on one worker than on another; with
        "auto" parts are of one size then, and `describe` says how many are dropped.

        Args:
            num_shards: Workers in all; "auto" takes both from
                `tfamp.distribute.cluster()`, which is all elements without a cluster.
            index: Which one this is, from 0. In `distribute_datasets_from_function`
                these are `context.num_input_pipelines` and
                `context.input_pipeline_id`.

        Returns:
            A pipeline with this stage. The size of its batches is that of all
            workers together where `fit` or `experimental_distribute_dataset` takes
            the dataset, and its length is unknown then, since steps are more than
            the part's own batches.

        Raises:
            TypeError: An argument is no integer.
            ValueError: `num_shards` is below 1, `index` is not in [0, num_shards) or
                came with "auto", or the environment describes half a cluster. `build`
                raises where "auto" finds other workers than TensorFlow trains with.

        Example:
            >>> import numpy as np
            >>> import tfamp
            >>> pipeline = tfamp.data.Pipeline.from_arrays(np.arange(7)).shard(3, 1)
            >>> [int(x) for x in pipeline.build()]
            [1, 4]
        """
        if not isinstance(num_shards, str):
            return self._with(Shard(num_shards, index))  # type: ignore[arg-type]  # it checks
        checks.choice("num_shards", num_shards, ("auto",))
        if index is not None:
            raise ValueError(
                f"`index` is {index!r} with `num_shards` 'auto', which finds it; "
                "expected none. Leave it out, or pass the number of shards."
            )
        return self._with(cluster_shard())

    def filter(
        self,
        predicate: Callable[..., Any] | None = None,
        *,
        missing: Any = None,
        outliers: Any = None,
        outlier_action: str | None = None,
        statistics: Statistics | None = None,
        shape: Any = None,
        shape_action: str | None = None,
    ) -> "Self":
        """Drops or repairs elements; what is dropped is counted.

        Shapes come first, then missing values, then outliers, and the predicate sees
        the result. `describe` says how many were dropped, and why. A pass that keeps
        nothing ends in an error. May come several times.

        Args:
            predicate: Called with the parts of an element, of a batch where it is
                written after `.batch` or `.bucket`; returns one boolean.
            missing: "drop" drops elements with a missing value in any input; "mean",
                "median" or "mode" fills it from `statistics`; a number fills NaN.
                Missing is NaN, and what `statistics` were told of. An imputer of
                scikit-learn goes into `.map`, fitted beforehand.
            outliers: ("zscore", 3.0), ("iqr", 1.5) or ("quantile", 0.01, 0.99), with
                limits from `statistics`. inf lies beyond every limit, NaN beyond none.
            outlier_action: "drop" drops elements with an outlier in any input; "clip"
                sets it to the limit. Goes with `outliers`.
            statistics: What `fit_statistics` found in the training data.
            shape: The shape of inputs, with None for any size: a tuple, or a dict of
                tuples by column. It becomes their static shape.
            shape_action: "drop" drops elements of another shape; "error" ends the
                pass; "crop_or_pad" cuts evenly on both sides of an axis that is too
                long, and adds zeros on both sides of one that is too short.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: An argument is of the wrong type.
            ValueError: An argument is unknown, or lacks the one it goes with.

        Example:
            >>> import numpy as np
            >>> import tfamp
            >>> pipeline = tfamp.data.Pipeline.from_arrays(np.array([1.0, np.nan, 3.0]))
            >>> [float(x) for x in pipeline.filter(missing="drop").build()]
            [1.0, 3.0]
        """
        return self._with(
            Filter(
                predicate,
                missing=missing,
                outliers=outliers,
                outlier_action=outlier_action,
                statistics=statistics,
                shape=shape,
                shape_action=shape_action,
            )
        )

    def balance(
        self,
        by: Callable[..., Any] | str | None = None,
        *,
        method: str = "resample",
        seed: int | None = None,
    ) -> "Self":
        """Makes all classes come equally often, by a new exact plan each epoch.

        Arrays and image files are drawn by position, and what the plan leaves out is
        never read. Anything else is read once by `build` for its labels, and each
        element is then repeated or dropped as the plan says: shuffle behind it.

        Rare classes come more often than they are: the model's probabilities are then
        those of a balanced world, and an example that comes 100 times in an epoch is
        learned by heart. Class weights in `fit` change the loss instead of the data.

        Args:
            by: What tells the class: None for the target, a key of dict elements, or
                a function of an element's parts.
            method: "resample" keeps the number of examples, "oversample" brings every
                class up to the largest, "undersample" down to the smallest.
            seed: Same seed, same sequence of epochs.

        Returns:
            A pipeline with this stage; its length is known.

        Raises:
            TypeError: `by` is none of the three, or `seed` no integer.
            ValueError: An unknown method.

        Example:
            >>> import numpy as np
            >>> import tfamp
            >>> x, y = np.arange(8), np.array([0] * 6 + [1] * 2)
            >>> pipeline = tfamp.data.Pipeline.from_arrays(x, y).balance(seed=1)
            >>> sorted(int(label) for _, label in pipeline.build())
            [0, 0, 0, 0, 1, 1, 1, 1]
        """
        return self._with(Balance(by, method=method, seed=seed))

    def weights(
        self,
        weights: Any,
        *,
        replacement: bool = True,
        num_examples: int | None = None,
        seed: int | None = None,
    ) -> "Self":
        """Draws examples in proportion to weights, by a new exact plan each epoch.

        Args:
            weights: One for each example, at least 0, or a function of an element's
                parts.
            replacement: Whether an example may come more than once in an epoch.
            num_examples: How many to draw; None for as many as there are.
            seed: Same seed, same sequence of epochs.

        Returns:
            A pipeline with this stage; its length is known.

        Raises:
            TypeError: `weights` is neither numbers nor a function.
            ValueError: A weight is negative or not finite, all are 0, or more are
                asked for than can be drawn without replacement.
        """
        return self._with(
            Weights(
                weights, replacement=replacement, num_examples=num_examples, seed=seed
            )
        )

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None
    ) -> "Self":
        """Puts the elements in a new random order each epoch.

        Args:
            buffer_size: Elements held to draw from. None for all of them where they
                fit into 256 MiB or the source is arrays, else for what fits there:
                the shuffle is then approximate, and `describe` says so. What counts is
                memory, about 200 bytes for each tensor beside its values. Where sizes
                vary, as those of texts, `build` reads 32 elements to tell; where the
                end is not known, at most 262,144 are held.
            seed: Same seed, same sequence of orders, epoch by epoch. TensorFlow
                mixes it with the global seed if one is set. None for another
                sequence each time. Several worker processes need one, the same in
                all, or `.shard`.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: An argument is no integer.
            ValueError: `buffer_size` is below 1, `seed` is below 0, or there is a
                shuffle already.
        """
        return self._with(Shuffle(buffer_size, seed))

    def bucket(
        self,
        batch_size: int | None = None,
        *,
        boundaries: str | Sequence[int] = "auto",
        length: Any = None,
        pad_to_multiple: int = LENGTH_MULTIPLE,
        max_shapes: int = DEFAULT_MAX_SHAPES,
        drop_remainder: bool = False,
        padding_values: Any = None,
        token_budget: int | None = None,
        mask: str | None = None,
        weight_padding: bool = False,
        too_long: str = "error",
    ) -> "Self":
        """Joins sequences of about one length into batches; in place of `.batch`.

        Sequences of about one length share a batch and are padded to the boundary of
        their bucket. There are few boundaries, so XLA compiles few shapes, and they are
        multiples of 8, which tensor cores want. With `drop_remainder` the boundaries
        are all shapes there are; without, each may have one smaller batch.

        Sequences are the parts of an element whose first dimension is unknown. All of
        them, inputs and targets, are padded to the same boundary.

        Args:
            batch_size: Sequences in a batch. Give this or `token_budget`.
            boundaries: What sequences are padded to, ascending. "auto" chooses those
                with the least padding, for which all lengths are read once in `build`.
            length: A function of an element's parts that gives the length that counts.
                None for the longest of its sequences.
            pad_to_multiple: What boundaries are multiples of.
            max_shapes: How many boundaries "auto" may choose. More of them pad less,
                and each is compiled once.
            drop_remainder: Whether to leave out batches that are not full, up to one of
                each bucket in an epoch.
            padding_values: None for zeros and empty strings; a value for all sequences
                of its kind; or a structure like the element's.
            token_budget: Places in a batch, padding included: long sequences come in
                smaller batches. The size is a multiple of 8 where it is 8 or more.
            mask: A key under which the dict of inputs gets a mask `(batch, length)`,
                True on what is no padding. None adds none; an `Embedding` with
                `mask_zero=True` then makes one from zeros.
            weight_padding: Whether to give (inputs, targets, weights) with weights
                `(batch, length)` of 0 on padding, times the weights there are. For
                targets that are a sequence.
            too_long: What to do above the last boundary: "error", "truncate" or "drop".
                The last two read all lengths in `build` and log how many.

        Returns:
            A pipeline with this stage; `describe` says what share is padding.

        Raises:
            TypeError: An argument of another type.
            ValueError: Both sizes or none, boundaries that do not ascend or are no
                multiples, or a budget below the last of them.
        """
        return self._with(
            Bucket(
                batch_size,
                boundaries=boundaries,
                length=length,
                pad_to_multiple=pad_to_multiple,
                max_shapes=max_shapes,
                drop_remainder=drop_remainder,
                padding_values=padding_values,
                token_budget=token_budget,
                mask=mask,
                weight_padding=weight_padding,
                too_long=too_long,
            )
        )
