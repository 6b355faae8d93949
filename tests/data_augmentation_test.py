"""Augmentation: transforms, functions, strength and ramp, seeds."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline
from tfamp.data.augmentation import Brightness, Contrast, Flip, Rotate, Shift

ALL = (Flip(True, True), Shift(), Rotate(), Brightness(), Contrast())


def images(size=6, *, dtype=np.uint8, shape=(8, 6, 3)):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (size, *shape))
    is_float = np.issubdtype(dtype, np.floating)
    return (pixels / 255 if is_float else pixels).astype(dtype)


def augmented(dataset, *steps, **arguments):
    return Pipeline.from_dataset(dataset).augment(*steps, **arguments).build()


def pairs(size=6, **kwargs):
    x = images(size, **kwargs)
    return tf.data.Dataset.from_tensor_slices((x, np.arange(size)))


def values(dataset):
    return np.stack([x.numpy() for x, *_ in dataset])


def flip_oracle(t, image, draw, strength):
    flipped = image[::-1] if t.vertical and draw[0] < strength / 2 else image
    return flipped[:, ::-1] if t.horizontal and draw[1] < strength / 2 else flipped


def shift_oracle(t, image, draw, strength):
    height, width, _ = image.shape
    down = round(draw[0] * strength * t.fraction * height)
    right = round(draw[1] * strength * t.fraction * width)
    # ... 1 0 | 0 1 2 | 2 1 ...
    padded = np.pad(image, ((height, height), (width, width), (0, 0)), "symmetric")
    down, right = down + height, right + width
    return padded[down : down + height, right : right + width]


def rotate_oracle(t, image, draw, strength):
    height, width, _ = image.shape
    angle = draw[0] * strength * np.deg2rad(t.degrees)
    found = np.zeros_like(image)
    for y, x in np.ndindex(height, width):
        y0, x0 = y - (height - 1) / 2, x - (width - 1) / 2
        v = np.cos(angle) * y0 - np.sin(angle) * x0 + (height - 1) / 2
        u = np.sin(angle) * y0 + np.cos(angle) * x0 + (width - 1) / 2
        v, u = min(max(v, 0), height - 1), min(max(u, 0), width - 1)
        for row, column in np.ndindex(height, width):
            weight = max(0, 1 - abs(v - row)) * max(0, 1 - abs(u - column))
            found[y, x] += weight * image[row, column]
    return found


ORACLES = {
    "flip": (Flip(True, True), 2, 0.0, flip_oracle),
    "shift": (Shift(1.0), 2, -1.0, shift_oracle),
    "rotate": (Rotate(170.0), 1, -1.0, rotate_oracle),
}
# Coordinates and sums carry float32's rounding; a pixel's step is at most 255.
FLOAT32_ERROR = 255 * 2.0**-18


@pytest.mark.parametrize(
    "transform, columns, low, oracle", ORACLES.values(), ids=ORACLES
)
def test_transforms_match_a_slow_reference(transform, columns, low, oracle):
    batch, strength = images(12, shape=(5, 8, 2)).astype(np.float64), 0.5
    seed = tf.constant([3, 1], tf.int32)
    drawn = tf.random.stateless_uniform([12, columns], seed, low, 1.0).numpy()
    expected = [
        oracle(transform, image, draw.astype(np.float64), strength)
        for image, draw in zip(batch, drawn, strict=True)
    ]
    found = transform(tf.constant(batch, tf.float32), strength, seed, 255.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_ERROR)


def test_strength_0_is_the_identity_bit_for_bit():
    x = images(dtype=np.float32)
    x[0, 0, 0] = [np.nan, -0.0, np.inf]
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(6)))
    # Strength 0 in the first epoch of a ramp, in the graph; and by argument.
    for arguments in ({"ramp_epochs": 2}, {"strength": 0.0}):
        found = values(augmented(dataset, *ALL, seed=1, **arguments))
        assert found.tobytes() == x.tobytes()


def test_a_seed_gives_the_same_epochs_and_each_its_own_draw():
    first, second = (augmented(pairs(), Shift(), seed=3) for _ in range(2))
    # Looking at the first elements changes nothing that comes later.
    next(iter(second))
    list(second.take(2))
    epochs = [values(first) for _ in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(epoch, values(second))
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    assert (epochs[0] != values(augmented(pairs(), Shift(), seed=4))).any()


def add_strength(image, strength):
    return image + tf.cast(100 * strength, image.dtype)


def test_the_ramp_grows_by_the_epochs_that_were_read_whole():
    zeros = tf.data.Dataset.from_tensor_slices(np.zeros((5, 2), np.float32))
    zeros = zeros.filter(lambda x: True)  # of a length that nobody knows
    dataset = augmented(zeros, add_strength, strength=0.8, ramp_epochs=4, seed=1)
    assert next(iter(dataset))[0] == 0
    found = [{float(x[0]) for x in dataset} for _ in range(6)]
    assert [round(value, 3) for (value,) in found] == [0, 20, 40, 60, 80, 80]


REFUSED = {
    "vectors": (
        lambda: augmented(tf.data.Dataset.from_tensor_slices(np.zeros((3, 4)))),
        "Images have the shape (4,); expected (height, width, channels).",
    ),
    "int32": (
        lambda: augmented(pairs(dtype=np.int32)),
        "Images are int32, and `value_range` is None; expected uint8, uint16",
    ),
    "cropped": (
        lambda: augmented(pairs(), lambda image, strength: image[:2]),
        "`<lambda>` makes the shape (2, 6, 3); expected (8, 6, 3), as it was",
    ),
    "endless": (
        lambda: augmented(pairs().repeat(), ramp_epochs=2),
        "`ramp_epochs` is 2 and the dataset has no end; expected epochs to count",
    ),
}
test_what_cannot_be_augmented_is_refused = refusals(REFUSED)


# Targets that are pictures too.
IMAGES = np.zeros((6, 8, 10, 3), "uint8")
MASK = np.zeros((6, 8, 10), "uint8")
# Steps, a target, and the number of warnings.
TARGETS = {
    "the default": ((), MASK, 1),
    "Shift, after Brightness": ((Brightness(), Shift()), MASK, 1),
    "a function": ((lambda image, strength: image[:, ::-1],), MASK, 1),
    "masks in a dict": ((Flip(),), {"mask": MASK, "label": np.zeros(6)}, 1),
    "labels": ((), np.zeros((6, 10), "float32"), 0),
    "boxes": ((), np.zeros((6, 5, 4), "float32"), 0),
    "another size": ((), np.zeros((6, 4, 5, 1), "uint8"), 0),
    "steps that move nothing": ((Brightness(), Contrast()), MASK, 0),
}


@pytest.mark.parametrize("steps, target, count", TARGETS.values(), ids=TARGETS)
def test_masks_that_stay_behind_are_told(steps, target, count, recwarn):
    Pipeline.from_arrays(IMAGES, target).augment(*steps, seed=1).build()
    assert [each.filename for each in recwarn] == [__file__] * count
    assert all(re.search("(8, 10).*one more channel", str(w.message)) for w in recwarn)


def test_the_remedy_keeps_masks_on_their_images():
    ramp = np.tile(np.arange(10, dtype="uint8")[:, None], (6, 8, 1, 3))
    masks = ramp[..., :1] // 5  # the right half
    pipeline = Pipeline.from_arrays(ramp, masks)
    pipeline = pipeline.map(lambda image, mask: (tf.concat([image, mask], -1), 0))
    pipeline = pipeline.augment(Flip(), Shift(), seed=1)
    pipeline = pipeline.map(lambda joined, _: (joined[..., :3], joined[..., 3:]))
    moved = []
    for _ in range(3):
        for image, mask in pipeline.build().as_numpy_iterator():
            np.testing.assert_array_equal(mask, image[..., :1] // 5)
            moved.append((image != ramp[0]).any())
    assert any(moved)


def test_blocks_lose_nothing_and_each_image_has_its_own_change():
    size = 75  # two blocks of 32, and 11
    zeros = np.zeros((size, 2, 2, 1), np.float32)
    dataset = Pipeline.from_arrays(zeros, np.arange(size))
    dataset = dataset.augment(Brightness(), seed=1).build()
    assert int(dataset.cardinality()) == size
    found = list(dataset)
    assert [int(number) for _, number in found] == list(range(size))
    added = {float(image[0, 0, 0]) for image, _ in found}
    assert len(added) == size and 0 not in added


def test_each_dataset_counts_its_own_epochs():
    pipeline = Pipeline.from_arrays(np.arange(3, dtype=np.float32), np.arange(3))
    pipeline = pipeline.augment(add_strength, ramp_epochs=4, seed=1)
    first, second = pipeline.build(), pipeline.build()
    assert [float(x) for x, _ in first] == [0, 1, 2]
    assert [float(x) for x, _ in first] == [25, 26, 27]
    # One that was left before its last element does not count.
    assert [float(x) for x, _ in second.take(2)] == [0, 1]
    assert [float(x) for x, _ in second] == [0, 1, 2]
    # Two at the same time are two looks at one epoch.
    assert [float(x) for (x, _), _ in zip(second, second, strict=True)] == [25, 26, 27]
    assert [float(x) for x, _ in second] == [50, 51, 52]
