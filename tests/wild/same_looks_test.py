"""What a program reads off a model and its runs is what it reads in float32."""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.utils import naming

import tfamp

layers = keras.layers
RNG = np.random.default_rng(0)
X, IDS = RNG.normal(size=(21, 6)).astype("float32"), RNG.integers(0, 20, (21, 6))
IMAGES = RNG.integers(0, 255, (21, 8, 8, 3), "uint8")


class Block(layers.Layer):
    """A layer without `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.Sequential([layers.Dense(8), layers.Dropout(0.1)])

    def call(self, inputs):
        return self.inner(inputs)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.block, self.out = Block(), layers.Dense(3)

    def call(self, inputs):
        return self.out(self.block(inputs))


def features():
    parts = [layers.BatchNormalization(), layers.Dense(8), layers.Dropout(0.1)]
    return keras.Sequential([*parts, layers.Dense(3)])


def images():
    parts = [layers.Rescaling(1 / 255), layers.Conv2D(4, 3), layers.MaxPooling2D()]
    return keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(3)])


def words():
    parts = [
        layers.Embedding(20, 8, mask_zero=True),
        layers.Bidirectional(layers.GRU(4)),
    ]
    return keras.Sequential([*parts, layers.Dense(3)])


def graph():
    x = keras.Input((6,), name="x")
    hidden = keras.ops.relu(layers.Dense(8)(x)) * 2.0
    return keras.Model({"x": x}, layers.Dense(3)(hidden))


CASES = {each.__name__: each for each in (features, images, words, graph, Own)}
DATA = {"images": IMAGES, "words": IDS, "graph": {"x": X}}


class Told(keras.callbacks.Callback):
    """What a callback is told, but for the numbers."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(*given, **named):
            told = [*given, *named.values()]
            self.calls.append((name, *(str(list_of(each)) for each in told)))

        return note


def list_of(value):
    return sorted(value) if isinstance(value, dict) else value


def looks(model):
    """Returns what Keras tells of a model, but for its dtypes."""
    text, names = io.StringIO(), "input_shape output_shape metrics_names built"
    if model.built:
        model.summary(print_fn=lambda line: text.write(line + "\n"))
    lines = [each for each in text.getvalue().split("\n") if "Total" not in each]
    return (
        {name: str(getattr(model, name, None)) for name in names.split()},
        [
            (type(each).__name__, each.name, each.built)
            for each in model._flatten_layers()
        ],
        [(w.path, tuple(w.shape), w.trainable) for w in model.weights],
        [(type(each).__name__, each.name) for each in model.metrics],
        [line for line in lines if "Optimizer" not in line],
        sorted(name for name in vars(model) if "tfamp" not in name and name[0] != "_"),
    )


def story(make, data, folder):
    """Returns what a program sees that trains, looks, saves, loads and exports."""
    naming.reset_uids()
    folder.mkdir()
    model, told, y = make(), Told(), RNG.integers(0, 3, 21)
    seen = [looks(model)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    history = model.fit(
        *(data, y),
        epochs=2,
        batch_size=8,
        validation_split=0.2,
        verbose=0,
        callbacks=[told],
    )
    seen += [sorted(history.history), history.epoch, str(history.params), looks(model)]
    results = model.evaluate(data, y, verbose=0, return_dict=True, callbacks=[told])
    outputs = model.predict(data, verbose=0, batch_size=5, callbacks=[told])
    seen += [sorted(results), type(outputs), outputs.shape, outputs.dtype, told.calls]
    seen += [type(each) for each in model.train_on_batch(data, y)]
    model.export(str(folder / "served"), verbose=False)
    served = tf.saved_model.load(str(folder / "served")).signatures["serving_default"]
    seen += [served.structured_input_signature, str(served.structured_outputs)]
    if not isinstance(model, Own):
        model.save(folder / "model.keras")
        custom = {"Block": Block}
        seen.append(looks(keras.saving.load_model(folder / "model.keras", custom)))
        seen.append(looks(keras.models.clone_model(model)))
    return seen


@pytest.mark.quick("features-mixed_float16")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_program_sees_what_it_sees_in_float32(name, policy, tmp_path):
    data, stories = DATA.get(name, X), []
    for one in ("float32", policy):
        with tfamp.scope(one) if one == policy else tf.name_scope(""):
            stories.append(story(CASES[name], data, tmp_path / one))
    for stock, here in zip(*stories, strict=True):
        assert here == stock
