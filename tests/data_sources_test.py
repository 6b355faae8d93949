"""Where a pipeline's elements come from: arrays, datasets, TensorFlow Datasets."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline

tfds = pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")


class Pairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Six examples: i -> 10 i."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"x": np.int64, "y": np.int64})
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("x", "y")
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(6):
            yield i, {"x": i, "y": 10 * i}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    builder = Pairs(data_dir=str(tmp_path_factory.mktemp("tfds")))
    builder.download_and_prepare()
    return builder


def test_arrays_keep_dtypes_and_structure():
    x = {"image": np.zeros((3, 2), np.uint8), "name": np.array(["a", "b", "c"])}
    dataset = Pipeline.from_arrays(x, np.zeros(3, np.float16), np.ones(3)).build()
    x_spec, y_spec, weight_spec = dataset.element_spec
    assert x_spec["image"] == tf.TensorSpec((2,), tf.uint8)
    assert x_spec["name"] == tf.TensorSpec((), tf.string)
    assert (y_spec.dtype, weight_spec.dtype) == (tf.float16, tf.float64)


WRONG_ARRAYS = {
    "lengths": (
        (np.zeros(3), np.zeros(4)),
        "Arrays have the lengths {'x': {3}, 'y': {4}}; expected one length",
    ),
    "list": (([1, 2],), "`x` holds a list; expected an array", TypeError),
}


test_wrong_arrays_are_refused = refusals(
    WRONG_ARRAYS, lambda arrays: Pipeline.from_arrays(*arrays)
)


def test_a_builder_gives_pairs_in_the_same_order_each_time(pairs):
    dataset = Pipeline.from_tfds(pairs, "train").build()
    read = [(int(x), int(y)) for x, y in dataset]
    assert sorted(read) == [(i, 10 * i) for i in range(6)]
    assert [(int(x), int(y)) for x, y in dataset] == read
    assert int(dataset.cardinality()) == 6
    assert dataset.options().autotune.enabled is False


WRONG_SOURCES = {
    "no dataset": (
        lambda _: Pipeline.from_dataset(np.zeros(3)),
        "`dataset` is a ndarray; expected a tf.data.Dataset.",
        TypeError,
    ),
    "empty": (
        lambda _: Pipeline.from_dataset(tf.data.Dataset.range(0)),
        "`dataset` has no elements; expected at least one.",
    ),
    "split": (lambda pairs: Pipeline.from_tfds(pairs, "test"), "Unknown split"),
}


@pytest.mark.parametrize("case", WRONG_SOURCES.values(), ids=WRONG_SOURCES)
def test_what_is_no_source_is_refused(case, pairs):
    call, message, kind = (*case, ValueError)[:3]
    with pytest.raises(kind, match=re.escape(message)):
        call(pairs)
