"""Where pipelines begin: the `from_...` methods of `Pipeline`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfamp.data import _arrays, _sources, _tfds
from tfamp.data._written import Written
from tfamp.data.sources import csv, images, text, tfrecord

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
    def from_images(
        cls: type[PipelineType],
        folder: Any,
        *,
        labels: Any = "inferred",
        class_names: Sequence[str] | None = None,
        extensions: Sequence[str] = images.EXTENSIONS,
    ) -> PipelineType:
        """Starts from image files, one folder for each class.

        Add `.decode(image_size)`: it comes right after shuffling and sampling, which
        move paths instead of pixels. Without it, elements hold paths.

        Args:
            folder: With `labels="inferred"` it holds one folder for each class.
                Otherwise all images below it count.
            labels: "inferred"; None for images alone; a sequence of integers, one for
                each image in the order of the paths; or a dict {path relative to
                `folder`: integer or class name}.
            class_names: Names in the order of their numbers, None for all, sorted.
            extensions: Endings of image files, with the dot, in any case.

        Returns:
            A pipeline of (image, label) with int32 labels, or images.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The folder is missing, holds no image, a class has none or is
                unknown, or labels do not fit the images.
        """
        return cls(
            images.images_source(
                folder, labels=labels, class_names=class_names, extensions=extensions
            )
        )

    @classmethod
    def from_tfrecord(
        cls: type[PipelineType],
        paths: Any,
        *,
        features: Mapping[str, Any] | None = None,
        compression: str | None = "auto",
        num_examples: int | str | None = "auto",
    ) -> PipelineType:
        """Starts from TFRecord files, plain or compressed.

        Args:
            paths: A file, a folder, a pattern such as "data/train-*", or a list.
            features: {name: feature} as `tf.io.parse_example` takes it: elements are
                then dicts. None for the records as strings.
            compression: "auto" to tell by the first bytes of each file; "GZIP",
                "ZLIB", or None for none.
            num_examples: Records in all. "auto" counts plain files by their lengths
                where that is quick, "count" always; None leaves it unknown.

        Returns:
            A pipeline with no stage yet.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A file is missing, empty or no TFRecord file, or the first
                records do not have the features.
        """
        return cls(
            tfrecord.tfrecord_source(
                paths,
                features=features,
                compression=compression,
                num_examples=num_examples,
            )
        )

    @classmethod
    def from_csv(cls: type[PipelineType], paths: Any, **options: Any) -> PipelineType:
        """Starts from the rows of CSV files, parsed by the chunk.

        Where no stage looks at single rows (batch alone), chunks become batches
        without being taken apart.

        Args:
            paths: A file, a folder, a pattern, or a list of these.
            **options: `label=` (the column that is the target), `columns=`,
                `dtypes=`, `header=`, `column_names=`, `delimiter=`, `na_values=`,
                `num_infer_rows=` and `num_examples=`, as `csv_source` explains them.

        Returns:
            A pipeline of dicts of scalars, or (dict, label).

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A file is missing, empty, without rows or with other columns,
                a column does not exist, or the delimiter is another one.
        """
        return cls(csv.csv_source(paths, **options))

    @classmethod
    def from_text(cls: type[PipelineType], paths: Any, **options: Any) -> PipelineType:
        """Starts from text files, one example a line or a file.

        Args:
            paths: A folder, a file, a pattern, or a list.
            **options: `labels=`, `class_names=`, `by=` ("line" or "file"),
                `keep_empty=`, `extensions=` and `num_examples=`, as `text_source`
                explains them.

        Returns:
            A pipeline of strings, or (string, label) with int32 labels.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A file is missing or no text, all are empty, or labels do not
                fit.
        """
        return cls(text.text_source(paths, **options))

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
