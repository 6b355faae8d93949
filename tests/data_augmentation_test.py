"""Augmentation: transforms, strength and ramp, seeds, the layer, the dtype check."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.data import Pipeline, augmentation
from tfamp.data.augmentation import (
    Augment,
    Brightness,
    Contrast,
    Cutout,
    Flip,
    Rotate,
    Shift,
    make_augment,
)
from tfamp.data.augmentation.chain import num_arguments

ALL = (Flip(True, True), Shift(), Rotate(), Brightness(), Contrast(), Cutout())
ROW = np.arange(4.0, dtype=np.float32).reshape(1, 1, 4, 1)


def images(size=6, *, dtype=np.uint8, shape=(8, 6, 3)):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (size, *shape))
    is_float = np.issubdtype(dtype, np.floating)
    return (pixels / 255 if is_float else pixels).astype(dtype)


def apply(transform, batch, strength=1.0, seed=0, span=255.0):
    found = transform(
        tf.constant(batch, tf.float32),
        tf.constant(strength, tf.float32),
        tf.constant([seed, 1], tf.int32),
        span,
    )
    return found.numpy()


def augmented(dataset, *steps, **arguments):
    """Returns a dataset behind the stage, as a pipeline will put it there."""
    stage = make_augment(*steps, **arguments)
    pipeline = Pipeline.from_dataset(dataset)
    return Pipeline(pipeline.source, (stage,)).build()


def pairs(size=6, **kwargs):
    x = images(size, **kwargs)
    return tf.data.Dataset.from_tensor_slices((x, np.arange(size)))


def values(dataset):
    return np.stack([x.numpy() for x, *_ in dataset])


# Each transform, against what can be said by hand.


def test_flip_mirrors_the_right_axis_in_half_of_the_images():
    batch = np.tile(np.arange(6.0).reshape(1, 2, 3, 1), (400, 1, 1, 1))
    found = apply(Flip(), batch)
    is_mirrored = (found == batch[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (is_mirrored | (found == batch).all(axis=(1, 2, 3))).all()
    # 200 expected of 400; 5 standard deviations are 50.
    assert 150 < is_mirrored.sum() < 250
    # A quarter of the strength, a quarter of the images.
    found = apply(Flip(), batch, strength=0.25)
    assert 17 < (found != batch).any(axis=(1, 2, 3)).sum() < 83


def test_flip_turns_over_only_where_asked():
    batch = np.tile(np.arange(2.0).reshape(1, 2, 1, 1), (50, 1, 1, 1))
    np.testing.assert_array_equal(apply(Flip(), batch), batch)
    assert (apply(Flip(vertical=True), batch) != batch).any()


def test_shift_moves_by_whole_pixels_and_mirrors_what_comes_in():
    batch = np.tile(ROW, (200, 1, 1, 1))
    found = {tuple(row.ravel()) for row in apply(Shift(0.5), batch)}
    # By 2 at most: ... 1 0 | 0 1 2 3 | 3 2 ...
    expected = {(1, 0, 0, 1), (0, 0, 1, 2), (0, 1, 2, 3), (1, 2, 3, 3), (2, 3, 3, 2)}
    assert found == expected


def test_rotate_by_a_quarter_turns_pixels():
    batch = np.tile(np.arange(9.0).reshape(1, 3, 3, 1), (64, 1, 1, 1))
    found = apply(Rotate(90.0), batch)
    # Four pixels lie on the axes at a whole quarter: look for the image nearest it.
    quarter = np.rot90(batch[0, :, :, 0])
    distance = np.minimum(
        np.abs(found[..., 0] - quarter).max(axis=(1, 2)),
        np.abs(found[..., 0] - np.rot90(quarter, 2)).max(axis=(1, 2)),
    )
    assert distance.min() < 0.3
    # The middle is where it was, whatever the angle.
    np.testing.assert_allclose(found[:, 1, 1, 0], 4.0, rtol=1e-6)


def test_rotate_matches_a_slow_reference():
    batch = images(3, shape=(7, 5, 2)).astype(np.float32)
    seed = tf.constant([3, 1], tf.int32)
    angles = tf.random.stateless_uniform([3, 1], seed, -1.0, 1.0).numpy()
    angles = angles[:, 0].astype(np.float64) * np.deg2rad(25.0) * 0.5
    expected = np.zeros_like(batch, np.float64)
    for n, angle in enumerate(angles):
        for y in range(7):
            for x in range(5):
                v = np.cos(angle) * (y - 3) - np.sin(angle) * (x - 2) + 3
                u = np.sin(angle) * (y - 3) + np.cos(angle) * (x - 2) + 2
                v, u = min(max(v, 0), 6), min(max(u, 0), 4)
                for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                    row, column = int(v) + i, int(u) + j
                    weight = (1 - abs(v - row)) * (1 - abs(u - column))
                    if weight > 0:
                        expected[n, y, x] += weight * batch[n, row, column]
    found = apply(Rotate(25.0), batch, strength=0.5, seed=3)
    # Coordinates carry float32's rounding, times a step of 255 between pixels.
    np.testing.assert_allclose(found, expected, atol=255 * 8 * 2.0**-22)


def test_brightness_adds_one_value_within_its_amount():
    batch = images(100).astype(np.float32)
    added = apply(Brightness(0.2), batch) - batch
    np.testing.assert_allclose(added, added[:, :1, :1, :1] + 0 * added, atol=1e-4)
    largest = np.abs(added).max()
    assert 0.9 * 0.2 * 255 < largest <= 0.2 * 255 + 1e-4
    assert np.abs(apply(Brightness(0.2), batch, strength=0.5) - batch).max() <= 25.51


def test_contrast_keeps_the_mean_and_scales_the_deviation():
    batch = images(100).astype(np.float32)
    found = apply(Contrast(0.4), batch)
    axes = (1, 2, 3)
    np.testing.assert_allclose(found.mean(axes), batch.mean(axes), rtol=1e-5)
    factor = found.std(axes) / batch.std(axes)
    assert 0.6 <= factor.min() < 0.64 and 1.36 < factor.max() <= 1.4 + 1e-5


def test_cutout_hides_one_square_behind_the_mean():
    batch = np.arange(80.0, dtype=np.float32).reshape(1, 8, 10, 1)
    found = apply(Cutout(0.5), np.tile(batch, (40, 1, 1, 1)))
    for image in found:
        rows, columns = np.nonzero(image[..., 0] != batch[0, :, :, 0])
        assert set(image[rows, columns, 0]) == {39.5}
        assert len(rows) == 16  # half of 8, squared
        assert np.ptp(rows) == np.ptp(columns) == 3


@pytest.mark.parametrize("transform", ALL, ids=lambda t: type(t).__name__)
def test_strength_0_changes_nothing_and_seeds_decide(transform):
    batch = images(20).astype(np.float32)
    np.testing.assert_array_equal(apply(transform, batch, strength=0.0), batch)
    first = apply(transform, batch)
    np.testing.assert_array_equal(first, apply(transform, batch))
    assert (first != apply(transform, batch, seed=1)).any()
    assert first.shape == batch.shape


@pytest.mark.parametrize("transform", ALL, ids=lambda t: type(t).__name__)
def test_transforms_do_in_a_compiled_graph_what_they_do_eagerly(transform):
    batch = images(4).astype(np.float32)
    compiled = tf.function(lambda x: apply_tensor(transform, x), jit_compile=True)
    # XLA draws by another generator: the same kind of change, another one.
    assert compiled(batch).shape == batch.shape
    graph = tf.function(lambda x: apply_tensor(transform, x))
    np.testing.assert_allclose(graph(batch), apply(transform, batch), atol=1e-3)


def apply_tensor(transform, batch):
    return transform(batch, tf.constant(1.0), tf.constant([0, 1], tf.int32), 255.0)


# The stage.


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32], ids=str)
def test_elements_keep_shape_dtype_labels_and_length(dtype):
    dataset = augmented(pairs(dtype=dtype), *ALL, seed=1)
    assert dataset.element_spec == pairs(dtype=dtype).element_spec
    assert int(dataset.cardinality()) == 6
    assert [int(y) for _, y in dataset] == list(range(6))
    assert (values(dataset) != images(dtype=dtype)).any()


def test_strength_0_is_the_identity_bit_for_bit():
    x = images(dtype=np.float32)
    x[0, 0, 0] = [np.nan, -0.0, np.inf]
    dataset = tf.data.Dataset.from_tensor_slices((x, np.arange(6)))
    # Strength 0 in the first epoch of a ramp, in the graph; and by argument.
    for arguments in ({"ramp_epochs": 2}, {"strength": 0.0}):
        found = values(augmented(dataset, *ALL, seed=1, **arguments))
        assert found.tobytes() == x.tobytes()


def test_a_seed_gives_the_same_epochs_and_each_its_own_draw():
    first, second = augmented(pairs(), seed=3), augmented(pairs(), seed=3)
    # Looking at the first elements changes nothing that comes later.
    next(iter(second))
    list(second.take(2))
    epochs = [values(first) for _ in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(epoch, values(second))
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    assert (epochs[0] != values(augmented(pairs(), seed=4))).any()


def test_equal_images_of_one_epoch_change_differently():
    same = tf.data.Dataset.from_tensor_slices(np.repeat(images(1), 8, axis=0))
    found = np.stack(list(augmented(same, Brightness(), seed=1)))
    assert len({image.tobytes() for image in found}) > 4


def test_keras_seed_decides_where_none_is_given():
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        found.append(values(augmented(pairs())))
    tf.random.set_seed(None)
    np.testing.assert_array_equal(found[0], found[1])


def add_strength(image, strength):
    return image + tf.cast(100 * strength, image.dtype)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown length"])
def test_the_ramp_grows_by_the_epochs_that_were_read_whole(known):
    zeros = tf.data.Dataset.from_tensor_slices(np.zeros((5, 2), np.float32))
    if not known:
        zeros = zeros.filter(lambda x: True)
    dataset = augmented(
        zeros, add_strength, strength=0.8, ramp_epochs=4, ramp_from=0.4, seed=1
    )
    assert next(iter(dataset))[0] == 40
    found = [{float(x[0]) for x in dataset} for _ in range(6)]
    assert [round(value, 3) for (value,) in found] == [40, 50, 60, 70, 80, 80]


def test_the_ramp_grows_in_fit_and_through_batches():
    seen = []

    class Look(keras.layers.Layer):
        def call(self, inputs):
            tf.py_function(lambda x: seen.append(float(x[0, 0])), [inputs], [])
            return inputs

    zeros = tf.data.Dataset.from_tensor_slices((np.zeros((6, 1)), np.zeros((6, 1))))
    stage = make_augment(add_strength, ramp_epochs=2, seed=1)
    pipeline = Pipeline.from_dataset(zeros).batch(3).prefetch()
    dataset = Pipeline(pipeline.source, (*pipeline.stages, stage)).build()
    model = keras.Sequential([Look(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(dataset, epochs=4, verbose=0)
    # Building may look at batches of the first epoch before it begins.
    assert seen[-8:] == [0, 0, 50, 50, 100, 100, 100, 100]


def test_a_ramp_goes_on_after_a_restart():
    zeros = tf.data.Dataset.from_tensor_slices(np.zeros((3, 2), np.float32))
    dataset = augmented(zeros, add_strength, ramp_epochs=4, initial_epoch=3, seed=1)
    assert [float(next(iter(dataset))[0])] == [75]


def test_functions_get_the_image_the_strength_and_a_seed():
    def noise(image, strength, seed):
        drawn = tf.random.stateless_uniform(image.shape, seed)
        return image + drawn * strength

    features = tf.data.Dataset.from_tensor_slices(np.zeros((4, 5), np.float32))
    found = np.stack(list(augmented(features, noise, seed=1, strength=0.5)))
    assert len(np.unique(found)) == 20
    assert 0 <= found.min() and 0.4 < found.max() < 0.5


def test_a_function_between_transforms_gets_the_dtype_of_the_images():
    dtypes = []

    def look(image, strength):
        dtypes.append(image.dtype)
        return image

    augmented(pairs(), Brightness(), look, Contrast(), seed=1)
    assert set(dtypes) == {tf.uint8}


def test_integers_are_limited_and_rounded_once():
    white = np.full((50, 2, 2, 1), 255, np.uint8)
    dataset = tf.data.Dataset.from_tensor_slices(white)
    found = np.stack(list(augmented(dataset, Brightness(0.5), seed=1)))
    assert found.max() == 255 and found.min() < 200


@pytest.mark.parametrize("supervised", [True, False], ids=["pair", "dict alone"])
def test_a_key_names_the_input_to_change(supervised):
    inputs = {"image": images(), "size": np.arange(6)}
    elements = (inputs, np.arange(6), np.ones(6)) if supervised else inputs
    dataset = tf.data.Dataset.from_tensor_slices(elements)
    found = list(augmented(dataset, Brightness(), key="image", seed=1))
    parts = [element[0] if supervised else element for element in found]
    assert [int(part["size"]) for part in parts] == list(range(6))
    assert (np.stack([part["image"] for part in parts]) != images()).any()


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: augmented(pairs(), key="image"),
            ValueError,
            "`key` is 'image' and the inputs are 'no dict'; expected the name",
        ),
        (
            lambda: augmented(tf.data.Dataset.from_tensors({"a": np.zeros((2, 2, 1))})),
            ValueError,
            "`key` is None and the inputs are ('a',); expected the name of one",
        ),
        (
            lambda: augmented(tf.data.Dataset.from_tensor_slices(np.zeros((3, 4)))),
            ValueError,
            "Images have the shape (4,); expected (height, width, channels).",
        ),
        (
            lambda: augmented(tf.data.Dataset.from_tensor_slices(["a"])),
            TypeError,
            "What is to be augmented is TensorSpec(shape=(), dtype=tf.string",
        ),
        (
            lambda: augmented(pairs(dtype=np.int32)),
            ValueError,
            "Images are int32, and `value_range` is None; expected uint8, uint16",
        ),
        (
            lambda: augmented(pairs(), lambda image, strength: image[:2]),
            ValueError,
            "`<lambda>` makes uint8 of shape (2, 6, 3); expected what it was given,",
        ),
        (
            lambda: augmented(pairs().repeat(), ramp_epochs=2),
            ValueError,
            "`ramp_epochs` is 2 and the dataset has no end; expected epochs to count",
        ),
        (
            lambda: make_augment(strength=1.5),
            ValueError,
            "`strength` is 1.5; expected a number in [0, 1]",
        ),
        (
            lambda: make_augment(ramp_from=0.5),
            ValueError,
            "`ramp_from` is 0.5 and `ramp_epochs` is 0; expected both or neither.",
        ),
        (
            lambda: make_augment(key=3),
            TypeError,
            "`key` is 3; expected the name of one input.",
        ),
        (
            lambda: make_augment(compute_dtype="fp16"),
            ValueError,
            "Unknown `compute_dtype` 'fp16'; expected 'float16', 'bfloat16' or",
        ),
        (
            lambda: make_augment(value_range=(1, 1)),
            ValueError,
            "`value_range` is (1.0, 1.0); expected the smaller number first.",
        ),
        (
            lambda: make_augment(value_range=255),
            TypeError,
            "`value_range` is 255; expected a pair of numbers.",
        ),
        (
            lambda: make_augment(keras.layers.RandomFlip(name="flip")),
            TypeError,
            "is a Keras layer; expected transforms of `tfamp.data.augmentation`",
        ),
        (
            lambda: make_augment("flip"),
            TypeError,
            "'flip' cannot be called; expected a transform of",
        ),
        (
            lambda: make_augment(lambda image: image),
            TypeError,
            "<lambda>(image) cannot: too many positional arguments; expected a",
        ),
        (
            lambda: Shift(2.0),
            ValueError,
            "`fraction` is 2.0; expected a number in [0, 1].",
        ),
    ],
    ids=[
        "key of no dict",
        "no key",
        "vectors",
        "text",
        "int32",
        "cropped",
        "endless",
        "strength",
        "ramp from",
        "key",
        "dtype",
        "empty range",
        "no range",
        "layer",
        "string",
        "one argument",
        "fraction",
    ],
)
def test_what_cannot_be_augmented_is_refused(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_the_number_of_arguments_is_read_from_the_signature():
    assert num_arguments(lambda image, strength, *, scale=1: image) == 2
    assert num_arguments(lambda image, strength, seed: image) == 3
    assert num_arguments(lambda *arguments: arguments[0]) == 3


def test_describe_tells_what_is_done():
    stage = make_augment(Flip(), add_strength, ramp_epochs=3, seed=1)
    pipeline = Pipeline.from_dataset(pairs())
    text = Pipeline(pipeline.source, (stage,)).describe()
    assert "Flip, add_strength; strength 0 to 1" in text
    assert "after the cache, so each epoch" in text


# The check against the compute dtype.


def with_check(function, dtype, compute_dtype, **arguments):
    x = images(dtype=dtype)
    dataset = tf.data.Dataset.from_tensor_slices(x)
    return augmented(
        dataset, Flip(), function, compute_dtype=compute_dtype, seed=1, **arguments
    )


@pytest.mark.parametrize(
    "function, compute_dtype, message",
    [
        (
            lambda image, strength: image * 1e6,
            "float16",
            "`<lambda>` gives values up to 1000000.0 at full strength; expected what "
            "float16 can hold, up to 65504.0.",
        ),
        (
            lambda image, strength: image / (image - image),
            "bfloat16",
            "`<lambda>` gives values up to nan at full strength; expected",
        ),
    ],
    ids=["too large", "nan"],
)
def test_values_beyond_the_compute_dtype_are_an_error(function, compute_dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        with_check(function, np.float32, compute_dtype)


def test_values_that_lose_their_resolution_are_warned_of_once():
    def far(image, strength):
        return image + 5000 * strength

    with pytest.warns(UserWarning, match="`far` gives values up to 5001") as caught:
        with_check(far, np.float32, "float16")
    assert len(caught) == 1
    assert "float16 tells them apart only in steps of 4. Expected" in str(
        caught[0].message
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.float32], ids=["uint8", "float32"])
@pytest.mark.parametrize("compute_dtype", ["float16", "bfloat16", "float32"])
def test_the_usual_changes_fit_every_compute_dtype(dtype, compute_dtype):
    # Warnings are errors here. Scaling alone loses nothing either.
    augmented(pairs(dtype=dtype), *ALL, compute_dtype=compute_dtype, seed=1)
    with_check(lambda image, s: image * 50, np.float32, compute_dtype)
    # Float32 holds what float16 does not.
    with_check(lambda image, s: image * 1e6, np.float32, "float32")


# The layer.


def test_the_layer_changes_images_in_training_only():
    layer = Augment(*ALL, seed=1)
    x = images()
    np.testing.assert_array_equal(layer(x), x)
    np.testing.assert_array_equal(layer(x, training=False), x)
    first, second = layer(x, training=True), layer(x, training=True)
    assert first.dtype == tf.uint8 and first.shape == x.shape
    assert (first.numpy() != x).any() and (first.numpy() != second.numpy()).any()


def test_the_layer_does_nothing_at_strength_0():
    layer = Augment(*ALL, strength=0.0)
    x = images(dtype=np.float32)
    x[0, 0, 0] = [np.nan, -0.0, np.inf]
    assert layer(x, training=True).numpy().tobytes() == x.tobytes()


def model_of(layer, policy="float32"):
    inputs = keras.Input((8, 6, 3), dtype="uint8")
    h = keras.layers.GlobalAveragePooling2D(dtype=policy)(
        keras.layers.Rescaling(1 / 255, dtype=policy)(layer(inputs))
    )
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(h))
    return model


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_ramp_of_the_layer_follows_the_epochs_of_fit(jit, policy):
    layer = Augment(*ALL, strength=0.8, dtype=policy)
    model = model_of(layer, policy)
    model.compile("sgd", "mse", jit_compile=jit)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(float(layer.strength.value))
    )
    fitting = {"epochs": 3, "verbose": 0, "callbacks": [layer.ramp(2, 0.4), note]}
    model.fit(images(), np.zeros((6, 1)), **fitting)
    np.testing.assert_allclose(seen, [0.4, 0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("form", ["keras", "saved model"])
def test_a_model_keeps_the_layer_through_its_files(form, tmp_path):
    layer = Augment(
        Flip(False, True),
        Shift(0.3),
        Rotate(7.0),
        Brightness(0.4),
        Contrast(0.5),
        Cutout(0.6),
        strength=0.7,
        value_range=(0.0, 200.0),
        seed=9,
        name="changes",
    )
    model = model_of(layer)
    layer.set_strength(0.3)
    expected = model(images()).numpy()
    if form == "saved model":
        model.export(tmp_path / "served", verbose=False)
        served = tf.saved_model.load(tmp_path / "served")
        np.testing.assert_allclose(served.serve(images()), expected, rtol=1e-6)
        return
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").get_layer("changes")
    assert loaded.transforms == layer.transforms
    assert loaded.get_config() == layer.get_config()
    assert tuple(loaded.value_range) == (0.0, 200.0) and loaded.seed == 9
    assert float(loaded.strength.value) == pytest.approx(0.3)
    np.testing.assert_array_equal(
        loaded(images(), training=True), layer(images(), training=True)
    )


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: Augment(add_strength),
            TypeError,
            "is no transform of `tfamp.data.augmentation`; expected Flip, Shift,",
        ),
        (lambda: Augment(strength=-1), ValueError, "`strength` is -1.0; expected"),
        (
            lambda: Augment().set_strength(2.0),
            ValueError,
            "`strength` is 2.0; expected a number in [0, 1].",
        ),
        (lambda: Augment().ramp(0), ValueError, "`epochs` is 0; expected an integer"),
        (
            lambda: keras.Sequential([keras.Input((3,)), Augment()]),
            ValueError,
            "Images have the shape (None, 3); expected (batch, height, width,",
        ),
    ],
    ids=["function", "strength", "set", "ramp", "shape"],
)
def test_the_layer_refuses_what_it_cannot_do(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_every_transform_can_be_named_in_a_file():
    kinds = {kind.__name__ for kind in augmentation.Transform.__subclasses__()}
    assert kinds == set(augmentation.transforms.BY_NAME)
