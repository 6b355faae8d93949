"""Augmentation of images whose targets are pictures too: masks that stay behind."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline
from tfamp.data.augmentation import Brightness, Contrast, Flip, Shift

IMAGES = np.zeros((6, 8, 10, 3), "uint8")


def flipped(image, strength):
    return tf.image.flip_left_right(image)


TARGETS = {
    "a mask": np.zeros((6, 8, 10), "uint8"),
    "masks in a dict": {"mask": np.zeros((6, 8, 10)), "label": np.zeros(6)},
}
MOVING = {
    "the default": (),
    "Flip": (Flip(),),
    "Shift, after Brightness": (Brightness(), Shift()),
    "a function": (flipped,),
}


@pytest.mark.parametrize("steps", MOVING.values(), ids=MOVING)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_masks_that_stay_behind_are_told(steps, target):
    pipeline = Pipeline.from_arrays(IMAGES, target).augment(*steps, seed=1)
    with pytest.warns(UserWarning, match="(8, 10)") as caught:
        pipeline.build()
    (said,) = caught
    assert "one more channel" in str(said.message)
    assert said.filename == __file__


PLAIN = {
    "labels": np.zeros(6, "int32"),
    "one-hot labels": np.zeros((6, 10), "float32"),
    "boxes": np.zeros((6, 5, 4), "float32"),
    "another size": np.zeros((6, 4, 5, 1), "uint8"),
}


@pytest.mark.parametrize("target", PLAIN.values(), ids=PLAIN)
def test_labels_and_features_of_other_shapes_need_no_word(target):
    Pipeline.from_arrays(IMAGES, target).augment(seed=1).build()


STILL = {
    "brightness": (Brightness(), Contrast()),
}


@pytest.mark.parametrize("steps", STILL.values(), ids=STILL)
def test_steps_that_leave_pixels_in_their_places_need_no_word(steps):
    pipeline = Pipeline.from_arrays(IMAGES, TARGETS["a mask"])
    pipeline.augment(*steps, seed=1).build()


def test_the_remedy_keeps_masks_on_their_images():
    ramp = np.tile(np.arange(10, dtype="uint8")[:, None], (6, 8, 1, 3))
    masks = ramp[..., :1] // 5  # the right half

    def join(image, mask):
        return tf.concat([image, mask], -1), 0

    def split(joined, _):
        return joined[..., :3], joined[..., 3:]

    pipeline = Pipeline.from_arrays(ramp, masks).map(join)
    pipeline = pipeline.augment(Flip(), Shift(), seed=1).map(split).batch(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = pipeline.build()
    moved = []
    for _ in range(3):
        ((image, mask),) = dataset.as_numpy_iterator()
        np.testing.assert_array_equal(mask, image[..., :1] // 5)
        moved.append((image != ramp).any())
    assert any(moved)
