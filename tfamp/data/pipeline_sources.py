"""What a pipeline begins with: the `from_...` verbs of `Pipeline`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfamp.data.sources import Source, csv, datasets, images, text, tfrecord
from tfamp.data.sources.csv import NA_VALUES
from tfamp.data.stages import ORDER, Role, Stage

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True)
class PipelineSources:
    """A source, and stages as they were written; one verb for each kind of source."""

    source: Source
    stages: tuple[Stage, ...] = ()

    @classmethod
    def from_tfds(
        cls,
        name_or_builder: Any,
        split: str = "train",
        *,
        as_supervised: bool = True,
        data_dir: str | None = None,
    ) -> "Self":
        """Starts from a split of a TensorFlow Datasets builder.

        Data that is not prepared yet is downloaded and prepared here, once.

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
            ConnectionError: The data is not here and cannot be downloaded.
            TypeError: `name_or_builder` is none of the three.
            ValueError: No such dataset or split, an empty split, or no pairs.
        """
        builder = datasets.open_builder(name_or_builder, data_dir=data_dir)
        return cls(datasets.tfds_source(builder, split, as_supervised=as_supervised))

    @classmethod
    def from_arrays(cls, x: Any, y: Any = None, sample_weight: Any = None) -> "Self":
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
        return cls(datasets.array_source(x, y, sample_weight))

    @classmethod
    def from_images(
        cls,
        folder: Any,
        *,
        labels: Any = "inferred",
        class_names: Sequence[str] | None = None,
        extensions: Sequence[str] = images.EXTENSIONS,
    ) -> "Self":
        """Starts from image files, one folder for each class.

        Add `.decode(image_size)`: it comes right after shuffling and sampling, which
        move paths instead of pixels. Without it, elements hold paths.

        Args:
            folder: With `labels="inferred"` it holds one folder for each class, as
                deep as they like. Otherwise all images below it count.
            labels: "inferred"; None for images alone; a sequence of integers, one for
                each image in the order of the paths; or a dict {path relative to
                `folder`: integer or class name}.
            class_names: Names in the order of their numbers, None for all, sorted.
                Class folders that are not named here are left out.
            extensions: Endings of image files, with the dot, in any case.

        Returns:
            A pipeline of (image, label) with int32 labels, or images.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The folder is missing, holds no image, a class has none or is
                unknown, or labels do not fit the images.
        """
        return cls(
            images.folder_source(
                folder, labels=labels, class_names=class_names, extensions=extensions
            )
        )

    @classmethod
    def from_tfrecord(
        cls,
        paths: Any,
        *,
        features: Mapping[str, Any] | None = None,
        compression: str | None = "auto",
        num_examples: int | str | None = "auto",
    ) -> "Self":
        """Starts from TFRecord files, plain or compressed.

        Args:
            paths: A file, a folder, a pattern such as "data/train-*", or a list.
                A damaged record ends a pass in `tf.errors.DataLossError`, which gives
                its byte; `.on_error("skip")` leaves it out and names the file too.
            features: {name: feature} as `tf.io.parse_example` takes it: elements are
                then dicts. None for the records as strings.
            compression: "auto" to tell by the first bytes of each file; "GZIP",
                "ZLIB", or None for none.
            num_examples: Records in all. "auto" counts plain files of about 100,000
                records or fewer by their lengths, "count" counts in any case, for
                which packed files are read once; None leaves it unknown.

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
    def from_csv(
        cls,
        paths: Any,
        *,
        label: str | None = None,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        header: bool = True,
        column_names: Sequence[str] | None = None,
        delimiter: str = ",",
        na_values: Sequence[str] = NA_VALUES,
        num_infer_rows: int = 1000,
        num_examples: int | str | None = "auto",
    ) -> "Self":
        """Starts from the rows of CSV files, which Arrow reads.

        Files are in UTF-8 as RFC 4180 has them: quoted fields may hold delimiters, line
        ends and doubled quotes. Empty lines do not count, and files ending in ".gz" or
        any other name are unpacked where they are compressed with gzip. Where no
        stage looks at single rows (batch alone), parsed chunks become batches
        without being taken apart.

        Args:
            paths: A file, a folder (its files ending in .csv, .tsv, .txt or .gz), a
                pattern, or a list of these. All have the same columns.
            label: The column that is the target; elements are then (dict, label).
            columns: Which columns to give, None for all.
            dtypes: {column: "float32", "float64", "int32", "int64" or "string"}, for
                those that are not to be inferred. A missing value is NaN in floats, ""
                in text, and an error in integers.
            header: Whether the first line of each file holds the names.
            column_names: Names where it does not; None for "column_0", "column_1", ...
            delimiter: One character.
            na_values: What stands for a missing value, in text columns too. The empty
                field always does, and "nan" in numbers. Unless you pass others, so do
                "N/A", "null", "?", "-" and more in columns of numbers.
            num_infer_rows: Rows of the first file that types are inferred from.
            num_examples: Rows in all. "auto" counts them if the files have at most
                64 MiB, "count" counts in any case, which reads all files once, None
                leaves the length of the dataset unknown.

        Returns:
            A pipeline of dicts of scalars, or (dict, label).

        Raises:
            ImportError: pyarrow is not installed.
            TypeError: An argument has the wrong type.
            ValueError: A file is missing, empty, without rows or with other columns, a
                column does not exist, or the delimiter is another one.
        """
        return cls(
            csv.csv_source(
                paths,
                label=label,
                columns=columns,
                dtypes=dtypes,
                header=header,
                column_names=column_names,
                delimiter=delimiter,
                na_values=na_values,
                num_infer_rows=num_infer_rows,
                num_examples=num_examples,
            )
        )

    @classmethod
    def from_text(
        cls,
        paths: Any,
        *,
        labels: Any = None,
        class_names: Sequence[str] | None = None,
        by: str = "line",
        keep_empty: bool = False,
        extensions: Sequence[str] = text.EXTENSIONS,
        num_examples: int | str | None = "auto",
    ) -> "Self":
        """Starts from text files, one example a line or a file.

        Files are in UTF-8, plain or compressed with gzip. A byte order mark is left
        out, and lines may end as on Windows.

        Args:
            paths: A folder, searched with all below it; or a file, a pattern, or a
                list.
            labels: None for texts alone; "inferred" for a folder that holds one folder
                for each class; a sequence of integers, one for each file in the order
                of the paths; or for a folder a dict {path relative to it: integer or
                name}. A file's label is that of each of its lines.
            class_names: Names in the order of their numbers, as for images.
            by: "line" if each line is an example, "file" if each file is.
            keep_empty: Whether to keep examples without a byte.
            extensions: Endings of the files that count inside a folder.
            num_examples: Examples in all. "auto" counts the lines of plain files of at
                most 64 MiB together, "count" counts in any case, which reads all files
                once, None leaves the length of the dataset unknown.

        Returns:
            A pipeline of strings, or (string, label) with int32 labels.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: A file is missing or no text, all are empty, or labels do not
                fit.
        """
        return cls(
            text.text_source(
                paths,
                labels=labels,
                class_names=class_names,
                by=by,
                keep_empty=keep_empty,
                extensions=extensions,
                num_examples=num_examples,
            )
        )

    @classmethod
    def from_dataset(cls, dataset: tf.data.Dataset) -> "Self":
        """Starts from any `tf.data.Dataset`, usually of single examples.

        Args:
            dataset: What to begin with. If its length is unknown, one element is
                read to see that there is one; of a generator that shows in the pass.

        Returns:
            A pipeline with no stage yet.

        Raises:
            TypeError: `dataset` is something else.
            ValueError: It is empty.
        """
        return cls(datasets.dataset_source(dataset))

    def _with(self, stage: Stage) -> "Self":
        """Returns the pipeline with one more stage."""
        is_there = any(stage.name == other.name for other in self.stages)
        if is_there and Role.REPEATS not in ORDER[stage.name]:
            raise ValueError(
                f"`.{stage.name}` came twice; expected each stage once, since the "
                "order they run in does not follow the order of the calls. Keep the "
                "one that is meant."
            )
        return dataclasses.replace(self, stages=(*self.stages, stage))
