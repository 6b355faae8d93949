"""Where pipelines begin: the `from_...` methods of `Pipeline`."""

from typing import Any, TypeVar

import tensorflow as tf

from tfamp.data import _arrays, _sources, _tfds
from tfamp.data._written import Written

PipelineType = TypeVar("PipelineType", bound="Starting")


class Starting(Written):
    """The beginnings of a pipeline, one for each kind of source."""

    @classmethod
    def from_tfds(
        cls: type[PipelineType],
        name_or_builder: Any,
        split: str = "train",
        *,
        as_supervised: bool = True,
        data_dir: str | None = None,
    ) -> PipelineType:
        """Starts from a split of a TensorFlow Datasets builder.

        Data that is not prepared yet is prepared here, once. If that needs a
        network and there is none, the error comes within seconds.

        Args:
            name_or_builder: A TFDS name ("mnist", "mnist:3.0.1"), a builder, or a
                builder class.
            split: A split as TFDS writes it: "train", "train[:80%]", "test".
            as_supervised: True gives the pairs (input, target) that `fit` takes,
                False gives dicts of all features.
            data_dir: Where prepared data lies; None for TFDS's own folder, or the
                builder's.

        Returns:
            A pipeline with no stage yet.

        Raises:
            ImportError: tensorflow-datasets is not installed.
            ConnectionError: The data is not here and there is no network.
            TypeError: `name_or_builder` is none of the three.
            ValueError: No such dataset or split, an empty split, or no pairs.
        """
        builder = _tfds.open_builder(name_or_builder, data_dir=data_dir)
        return cls(_sources.tfds_source(builder, split, as_supervised=as_supervised))

    @classmethod
    def from_arrays(
        cls: type[PipelineType], x: Any, y: Any = None, sample_weight: Any = None
    ) -> PipelineType:
        """Starts from arrays in memory.

        They are copied once, to the CPU, so later changes to them don't show.

        Args:
            x: An array `(examples, ...)`, or a dict or tuple of such arrays.
            y: Targets, likewise; None for elements that are `x` alone.
            sample_weight: One weight for each example; needs `y`.

        Returns:
            A pipeline of elements x, (x, y) or (x, y, sample_weight).

        Raises:
            TypeError: A list, or something that is no array.
            ValueError: Lengths differ, or there are no examples.

        Example:
            >>> import numpy as np
            >>> import tfamp
            >>> pairs = tfamp.data.Pipeline.from_arrays(np.arange(3), np.arange(3) * 10)
            >>> [(int(x), int(y)) for x, y in pairs.build()]
            [(0, 0), (1, 10), (2, 20)]
        """
        return cls(_arrays.array_source(x, y, sample_weight))

    @classmethod
    def from_dataset(cls: type[PipelineType], dataset: tf.data.Dataset) -> PipelineType:
        """Starts from any `tf.data.Dataset`, usually of single examples.

        Args:
            dataset: What to begin with. If its length is unknown, one element is
                read to see that there is one, which starts a generator once more.

        Returns:
            A pipeline with no stage yet.

        Raises:
            TypeError: `dataset` is something else.
            ValueError: It is empty.
        """
        return cls(_sources.dataset_source(dataset))
