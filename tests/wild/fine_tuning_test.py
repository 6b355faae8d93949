"""A loaded Sequential model gets another head and is trained on."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tests.wild.checking import COPIES, by_file

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


WAYS = {"file": by_file, "deepcopy": COPIES["deepcopy"]}


def is_third(layer):
    return layer.name == "third"


@pytest.mark.quick("deepcopy")
@pytest.mark.parametrize("way", WAYS)
def test_layers_stay_in_float32_under_a_new_head(way, tmp_path):
    keep = ["default", "second", is_third]
    with tfamp.scope("mixed_float16", keep_float32=keep):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(8, name="first"),
                layers.UnitNormalization(),
                layers.Dense(8, name="second"),
                layers.Dense(8, name="third"),
                layers.Dense(1, activation="sigmoid", name="head"),
            ]
        )
        model.compile("adam", "binary_crossentropy")
    tuned = WAYS[way](model, tmp_path)
    tuned.pop()
    tuned.add(layers.Dense(3, activation="softmax", name="new_head"))
    tuned.compile("adam", "sparse_categorical_crossentropy")
    x, y = np.ones((4, 8), "float32"), np.zeros(4, "int32")
    assert np.isfinite(tuned.fit(x, y, verbose=0).history["loss"]).all()
    dtypes = [row.compute_dtype for row in tfamp.assignment(tuned)]
    assert dtypes == ["float16", "float16", *["float32"] * 4]
