"""Saved models carry their dtypes: a fresh process, without `enable`, has them all."""

import copy
import json
import re
import subprocess
import sys
import textwrap
import zipfile

import keras
import numpy as np
import pytest

import tfamp

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 6, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 8)

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


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


def trained(build, policy):
    with tfamp.scope(
        policy, keep_float32=KEEP if build is not subclassed else "default"
    ):
        model = build()
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(X, Y, verbose=0, epochs=2)
    return model


READ = """
    import json, sys
    sys.path.insert(0, {root!r})
    import keras, numpy as np
    import tfamp
    import tests.saved_models_test  # registers the subclassed model
    from tests.recorded_operations import recorded_operations
    model = {load}({path!r})
    x = np.load({data!r})
    with recorded_operations() as operations:
        y = model.predict(x, verbose=0)
    np.save({answer!r}, y)
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    print(json.dumps({{
        "rows": tests.saved_models_test.rows_of(model),
        "dtypes": {{k: sorted(v) for k, v in sorted(operations.dtypes.items()) if v}},
        "optimizer": type(optimizer).__name__,
        "iterations": int(inner.iterations),
        "state": tests.saved_models_test.state_of(optimizer),
        "policy": model.dtype_policy.name,
        "global": keras.config.dtype_policy().name,
    }}))
"""


def read_in_a_fresh_process(tmp_path, pytestconfig, load="tfamp.load_model"):
    answer = tmp_path / "answer.npy"
    np.save(tmp_path / "data.npy", X)
    script = textwrap.dedent(READ).format(
        root=str(pytestconfig.rootpath),
        load=load,
        path=str(tmp_path / "model.keras"),
        data=str(tmp_path / "data.npy"),
        answer=str(answer),
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), np.load(answer)


def rows_of(model):
    return [
        [r.class_name, r.compute_dtype, r.variable_dtype, r.output_dtype, r.rule]
        for r in tfamp.assignment(model)
    ]


def state_of(optimizer):
    variables = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
    return [float(np.sum(v, dtype="float64")) for v in variables]


@pytest.mark.most(3)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_fresh_process_has_dtypes_predictions_and_optimizer(
    name, policy, tmp_path, pytestconfig
):
    model = trained(BUILDERS[name], policy)
    expected = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    found, answer = read_in_a_fresh_process(tmp_path, pytestconfig)
    assert found["rows"] == rows_of(model)
    np.testing.assert_array_equal(answer, expected)
    assert found["iterations"] == 2
    assert found["optimizer"] == type(model.optimizer).__name__
    assert found["state"] == state_of(model.optimizer)
    assert (found["policy"], found["global"]) == (policy, "float32")
    assert found["dtypes"]["Softmax"] == ["float32"]


# Stock Keras cannot load a mixed subclassed model that adds tensors by hand.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["functional", "sequential"])
def test_plain_keras_loads_the_file_as_it_can(name, tmp_path, pytestconfig):
    model = trained(BUILDERS[name], "mixed_float16")
    model.save(tmp_path / "model.keras")
    found, answer = read_in_a_fresh_process(
        tmp_path, pytestconfig, load="keras.saving.load_model"
    )
    # The optimizer was wrapped before `compile` saw it, so even stock Keras has it.
    assert found["optimizer"] == "LossScaleOptimizer"
    assert found["iterations"] == 2
    # Only the layers' own dtypes are in the config: near, but not the same.
    np.testing.assert_allclose(answer, model.predict(X, verbose=0), atol=0.02)


@pytest.mark.parametrize("name", BUILDERS)
def test_training_goes_on_after_loading(name, tmp_path):
    model = trained(BUILDERS[name], "mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    loaded.fit(X, Y, verbose=0)
    assert int(loaded.optimizer.iterations) == 3
    assert rows_of(loaded) == rows_of(model)
    assert not tfamp.status().enabled


def test_loading_while_another_policy_is_enabled(tmp_path):
    model = trained(functional, "mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    with tfamp.scope("mixed_float16"):
        loaded = tfamp.load_model(tmp_path / "model.keras")
        assert layers.Dense(1).compute_dtype == "float16"
    assert rows_of(loaded) == rows_of(model)
    np.testing.assert_array_equal(
        loaded.predict(X, verbose=0), model.predict(X, verbose=0)
    )


@pytest.mark.parametrize("name", ["functional", "sequential"])
def test_a_deep_copy_computes_the_same(name):
    model = trained(BUILDERS[name], "mixed_bfloat16")
    copied = copy.deepcopy(model)
    assert rows_of(copied) == rows_of(model)
    np.testing.assert_array_equal(
        copied.predict(X, verbose=0), model.predict(X, verbose=0)
    )


def test_a_file_saved_without_tfamp_loads_as_keras_loads_it(tmp_path):
    model = functional()
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert "tfamp" not in json.loads(file.read("metadata.json"))
    loaded = tfamp.load_model(tmp_path / "model.keras")
    assert {row.rule for row in tfamp.assignment(loaded)} == {"not managed"}


def test_applied_models_are_saved_alike(tmp_path):
    model = functional()
    tfamp.apply(model, "mixed_bfloat16", keep_float32=KEEP)
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    assert rows_of(loaded) == rows_of(model)
    np.testing.assert_array_equal(
        loaded.predict(X, verbose=0), model.predict(X, verbose=0)
    )


def test_an_unzipped_archive(tmp_path):
    model = trained(functional, "mixed_bfloat16")
    keras.saving.save_model(model, tmp_path / "model", zipped=False)
    assert rows_of(tfamp.load_model(tmp_path / "model")) == rows_of(model)


def test_a_folder_that_is_no_archive(tmp_path):
    message = re.escape(f"Cannot read {str(tmp_path)!r} as a `.keras` archive")
    with pytest.raises(ValueError, match=message):
        tfamp.load_model(tmp_path)


def test_a_missing_file(tmp_path):
    path = str(tmp_path / "none.keras")
    message = re.escape(f"Found no file {path!r}; expected a model saved with")
    with pytest.raises(FileNotFoundError, match=message):
        tfamp.load_model(path)


def test_a_file_that_is_no_archive(tmp_path):
    path = tmp_path / "model.keras"
    path.write_bytes(b"half a file")
    message = re.escape(f"Cannot read {str(path)!r} as a `.keras` archive")
    with pytest.raises(ValueError, match=message):
        tfamp.load_model(path)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.update(schema=99), "has schema 99; expected 1"),
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
