"""Saved models carry their dtypes: a fresh process, without `enable`, has them all.

What else only a fresh process can show is asked of the same one.
"""

import functools
import json
import pickle
import re
import subprocess
import sys
import textwrap
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests import loss_scale_state_test as state
from tests.arrays import assert_close

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 6, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 8)


@keras.saving.register_keras_serializable("tfamp_tests")
class Classifier(keras.Model):
    """A subclassed model with every kind of layer that is hard to restore."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1)
        self.norm = layers.LayerNormalization()
        self.recurrent = layers.Bidirectional(layers.LSTM(4))
        self.head = layers.Dense(3, activation="softmax")

    def call(self, x):
        x = x + self.norm(self.attention(x, x))
        return self.head(self.recurrent(x))


def subclassed():
    return Classifier()


def functional():
    x = keras.Input((6, 4))
    h = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    h = layers.Add()([x, layers.LayerNormalization()(h)])
    h = layers.Bidirectional(layers.LSTM(4))(h)
    return keras.Model(x, layers.Dense(3, activation="softmax")(h))


def sequential():
    return keras.Sequential(
        [
            layers.BatchNormalization(),
            layers.Bidirectional(layers.LSTM(4)),
            layers.Dense(3, activation="softmax"),
        ]
    )


BUILDERS = {f.__name__: f for f in (functional, sequential, subclassed)}
KEEP = ["default", layers.LSTM]


@functools.cache
def trained(name, run_eagerly=True):
    """Returns a model after a step; tests that share it leave it as it is."""
    policy = "mixed_bfloat16" if name == "sequential" else "mixed_float16"
    with tfamp.scope(policy, keep_float32="default" if name == "subclassed" else KEEP):
        model = BUILDERS[name]()
        model.compile(
            "adam",
            "sparse_categorical_crossentropy",
            run_eagerly=run_eagerly,
            jit_compile=False,
        )
    model.fit(X, Y, verbose=0)
    return model


REFUSED = {
    "hysteresis": dict(hysteresis=3),
    "dynamic": dict(dynamic=False),
    "accumulation_steps": dict(accumulation_steps=2),
    "max_consecutive_skips": dict(max_consecutive_skips=None),
}
# First Keras alone, then tfamp with hooks that stand, then saved models.
FRESH = """
    import gc, pickle, sys
    import keras
    import numpy as np
    asked = pickle.loads({asked!r})
    folder = asked["folder"]
    answers = {{"errors": []}}
    optimizer = keras.saving.load_model(f"{{folder}}/alone.keras").optimizer
    answers["alone"] = type(optimizer), [np.array(v) for v in optimizer.variables]
    for config in asked["configs"]:
        try:
            keras.saving.deserialize_keras_object(config)
        except Exception as error:
            answers["errors"].append(str(error))
    assert not any(name.split(".")[0] == "tfamp" for name in sys.modules)

    sys.path.insert(0, asked["root"])
    import tfamp
    layers = keras.layers
    hooked = answers["hooks"] = [tfamp.status().hooks]
    with tfamp.scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    hooked.append(len(tfamp.status().hooks) > 0)
    del model
    gc.collect()

    model = pickle.loads(asked["pickled"])
    answers["pickled"] = type(model.optimizer).__name__, [
        (row.compute_dtype, row.rule) for row in tfamp.assignment(model)
    ], model.predict(np.ones((2, 2)), verbose=0), keras.config.dtype_policy().name
    del model

    from tests import loss_scale_state_test as state
    from tests import saved_models_test as test  # registers the subclassed model
    from tests.recorded_operations import recorded_operations
    loaders = {{"tfamp": tfamp.load_model, "keras": keras.saving.load_model}}
    ours = keras.saving.load_model(f"{{folder}}/alone.keras").optimizer
    hooked.append(type(ours) is tfamp.LossScaleOptimizer)
    for name, loader in asked["loads"]:
        model = loaders[loader](f"{{folder}}/{{name}}.keras")
        if name == "scaled":
            state.train(model, state.BATCHES[state.HALF_WAY :])
            answers[name, loader] = state.facts_of(model)
            continue
        with recorded_operations() as operations:
            predictions = model.predict(test.X, verbose=0)
        answers[name, loader] = {{
            "predictions": predictions,
            "softmax": operations.of("Softmax"),
            "global": keras.config.dtype_policy().name,
            **test.facts_of(model),
        }}
    print(pickle.dumps(answers).hex())
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, pytestconfig):
    """What a fresh process finds, and the models; it starts once for all tests."""
    folder = tmp_path_factory.mktemp("models")
    models = {name: trained(name, name != "functional") for name in BUILDERS}
    alone = state.model_of("mixed_float16", {})
    models["alone"] = alone
    state.train(alone, state.BATCHES[: state.HALF_WAY])
    case = state.CASES["float16 accumulation"]
    models["scaled"] = state.model_of(*case, run_eagerly=False)
    state.train(models["scaled"], state.BATCHES[: state.HALF_WAY])
    with tfamp.scope("mixed_bfloat16", keep_float32=[layers.LeakyReLU]):
        parts = [layers.Dense(8), layers.LeakyReLU(), layers.Dense(2)]
        models["pickled"] = keras.Sequential([keras.Input((2,)), *parts])
    models["pickled"].compile("sgd", "mse")
    for name, model in models.items():
        model.save(folder / f"{name}.keras")
    state.train(models["scaled"], state.BATCHES[state.HALF_WAY :])
    # Stock Keras cannot load a mixed subclassed model that adds tensors by hand.
    by_keras = ["functional", "sequential", "scaled"]
    asked = {
        "folder": str(folder),
        "root": str(pytestconfig.rootpath),
        "configs": [
            keras.saving.serialize_keras_object(
                tfamp.LossScaleOptimizer(keras.optimizers.SGD(), **each)
            )
            for each in REFUSED.values()
        ],
        "pickled": pickle.dumps(models["pickled"]),
        "loads": [(name, "tfamp") for name in (*BUILDERS, "scaled")]
        + [(name, "keras") for name in by_keras],
    }
    script = textwrap.dedent(FRESH).format(asked=pickle.dumps(asked))
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return pickle.loads(bytes.fromhex(done.stdout.splitlines()[-1])), models


def rows_of(model):
    return [
        [r.class_name, r.compute_dtype, r.variable_dtype, r.output_dtype, r.rule]
        for r in tfamp.assignment(model)
    ]


def facts_of(model):
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {
        "rows": rows_of(model),
        "optimizer": type(optimizer),
        "iterations": int(inner.iterations),
        "state": [np.sum(np.array(v), dtype="float64") for v in optimizer.variables],
        "policy": model.dtype_policy.name,
    }


@pytest.mark.quick("*")
@pytest.mark.parametrize("name", BUILDERS)
def test_a_fresh_process_has_dtypes_predictions_and_optimizer(name, fresh):
    found, model = fresh[0][name, "tfamp"], fresh[1][name]
    expected = facts_of(model)
    assert {fact: found[fact] for fact in expected} == expected
    assert found["iterations"] == 1
    assert found["softmax"] == {"float32"}
    assert found["global"] == "float32"
    np.testing.assert_array_equal(found["predictions"], model.predict(X, verbose=0))


@pytest.mark.parametrize("name", ["functional", "sequential"])
def test_plain_keras_loads_the_file_as_it_can(name, fresh):
    found, model = fresh[0][name, "keras"], fresh[1][name]
    # The optimizer was wrapped before `compile` saw it, so even stock Keras has it.
    assert found["optimizer"] is type(model.optimizer)
    assert found["iterations"] == 1
    # Only the layers' own dtypes are in the config: near, but not the same.
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(found["predictions"], expected, atol=0.02)


@pytest.mark.parametrize("loader", ["tfamp", "keras"])
def test_training_with_a_loss_scale_goes_on_bit_by_bit(loader, fresh):
    answers, models = fresh
    state.assert_same(answers["scaled", loader], state.facts_of(models["scaled"]))


def test_plain_keras_goes_on_where_tfamp_is_missing(fresh):
    answers, models = fresh
    cls, variables = answers["alone"]
    assert cls is keras.optimizers.LossScaleOptimizer
    optimizer = models["alone"].optimizer
    expected = [np.array(v) for v in optimizer.variables[: len(variables)]]
    np.testing.assert_equal(variables, expected)
    assert optimizer.scale == 2.0**14  # one backoff


def test_plain_keras_refuses_by_name_what_it_cannot_honor(fresh):
    for name, text in zip(REFUSED, fresh[0]["errors"], strict=True):
        assert name in text


def test_hooks_stand_from_the_first_use(fresh):
    assert fresh[0]["hooks"] == [(), True, True]


def test_loading_while_another_policy_is_enabled(tmp_path):
    model = trained("functional")
    model.save(tmp_path / "model.keras")
    with tfamp.scope("mixed_bfloat16"):
        loaded = tfamp.load_model(tmp_path / "model.keras")
        assert layers.Dense(1).compute_dtype == "bfloat16"
    assert rows_of(loaded) == rows_of(model)
    np.testing.assert_array_equal(loaded(X), model(X))


def test_a_pickle_is_the_same_in_a_process_that_has_not_imported_tfamp(fresh):
    optimizer, rows, predictions, policy = fresh[0]["pickled"]
    model = fresh[1]["pickled"]
    assert rows == [(row.compute_dtype, row.rule) for row in tfamp.assignment(model)]
    assert "float32" in {dtype for dtype, _ in rows}
    np.testing.assert_array_equal(predictions, model.predict(np.ones((2, 2))))
    assert (optimizer, policy) == ("SGD", "float32")


def test_what_is_no_archive_is_told(tmp_path):
    file = tmp_path / "model.keras"
    file.write_bytes(b"half a file")
    with pytest.raises(ValueError, match="Cannot read .* as a `.keras` archive"):
        tfamp.load_model(file)
    with pytest.raises(FileNotFoundError, match="none.keras"):
        tfamp.load_model(tmp_path / "none.keras")


def rewrite(path, change):
    """Rewrites the metadata of an archive."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    metadata = json.loads(members["metadata.json"])
    change(metadata["tfamp"])
    members["metadata.json"] = json.dumps(metadata).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)


@pytest.mark.quick("newer schema")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.update(schema=99), "has schema 99; expected 2"),
        (lambda entry: entry["layers"].pop(), "or of other classes"),
    ],
    ids=["newer schema", "another model"],
)
def test_a_file_that_describes_something_else(tmp_path, change, message):
    path = tmp_path / "model.keras"
    with tfamp.scope("mixed_bfloat16"):
        functional().save(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=re.escape(message)):
        tfamp.load_model(path)
    assert not tfamp.status().enabled


def test_an_unzipped_archive(tmp_path):
    model = trained("functional")
    keras.saving.save_model(model, tmp_path / "model", zipped=False)
    assert rows_of(tfamp.load_model(tmp_path / "model")) == rows_of(model)


class TwoInputs(keras.Model):
    def __init__(self, dtype=None):
        super().__init__(dtype=dtype)
        self.hidden, self.head = keras.layers.Dense(8), keras.layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs["first"] + inputs["second"]))


@pytest.mark.parametrize(
    ("dtype", "taken"), [(None, "float32"), ("float16", "float16")]
)
def test_keras_own_export_takes_float32_as_the_model_did(dtype, taken, tmp_path):
    """In stock Keras it takes float16, and a client's float32 is refused."""
    x = {name: tf.fill((4, 3), 1.0 + 2**-7) for name in ("first", "second")}
    with tfamp.scope("mixed_float16"):
        model = TwoInputs(dtype)
        wanted = model(x)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    given = {name: tf.cast(part, taken) for name, part in x.items()}
    np.testing.assert_array_equal(exported.serve(given), wanted)


@pytest.mark.parametrize("is_called", [False, True], ids=["adapted", "called"])
def test_a_feature_space_is_loaded_that_makes_its_last_layers_in_a_call(
    is_called, tmp_path
):
    space = keras.utils.FeatureSpace
    data = {
        "age": np.array([20.0, 30.0, 40.0, 50.0]),
        "job": np.array(["a", "b", "a", "c"]),
        "sex": np.array([0, 1, 1, 0]),
    }
    given = {name: tf.constant(column) for name, column in data.items()}
    with tfamp.scope("mixed_float16"):
        features = {
            "age": space.float_normalized(),
            "job": space.string_categorical(),
            "sex": space.integer_categorical(num_oov_indices=0),
        }
        made = space(features=features, output_mode="concat")
        made.adapt(tf.data.Dataset.from_tensor_slices(data).batch(2))
        if is_called:
            made(given)
        made.save(tmp_path / "space.keras")
        loaded = keras.saving.load_model(tmp_path / "space.keras")
        assert_close(loaded(given), made(given))
        rows = tfamp.assignment(loaded).layers
    assert_close(tfamp.load_model(tmp_path / "space.keras")(given), made(given))
    (norm,) = [row for row in rows if row.class_name == "Normalization"]
    assert (norm.compute_dtype, norm.output_dtype) == ("float32", "float32")
