"""A Keras that nobody has tested is asked first, and refused where it has changed."""

import inspect
import random
import re
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.layer import TFLayer
from keras.src.ops.operation import Operation
from keras.src.saving import saving_lib

import tfamp
from tfamp.dtypes import hooks
from tfamp.dtypes.hooks import SelfTest
from tfamp.keras_hooks.patches import HookError
from tfamp.records import versions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


@pytest.fixture
def untested(monkeypatch):
    """Keras without a hook, whose version nobody knows."""
    monkeypatch.delenv(versions.UNTESTED_KERAS, raising=False)
    tf.zeros(())  # starts TensorFlow
    monkeypatch.setattr(hooks, "SELF_TEST", SelfTest("9.0"))
    stood = [patches for patches in hooks.HOOKS if patches.installed]
    hooks.remove()
    with monkeypatch.context() as changes:
        yield changes
        tfamp.disable()  # where `enable` has not refused
        hooks.remove()
    for patches in stood:
        patches.install()


def call_without_super(changes):
    """Changes a few words in the source of one of Keras's methods."""
    inner = inspect.unwrap(vars(keras.layers.Layer)["__call__"])
    source = textwrap.dedent(inspect.getsource(inner))
    assert "super().__call__(" in source
    scope = dict(inner.__globals__, Operation=Operation)
    exec(source.replace("super().__call__(", "Operation.__call__(self, "), scope)
    changes.setattr(keras.layers.Layer, "__call__", scope["__call__"])


def softmax_past_the_backend(changes):
    raw = tf.raw_ops.Softmax
    changes.setattr(keras.layers.Activation, "call", lambda self, x: raw(logits=x))


def missing_method(changes):
    changes.delattr(saving_lib, "_serialize_model_as_json")


def a_method_that_fails(changes):
    changes.delattr(keras.layers.LayerNormalization, "call")


CHANGES = {
    "no super().__call__": (call_without_super, "the output of LayerNormalization"),
    "softmax": (softmax_past_the_backend, "softmax is not computed in float32"),
    "an error": (a_method_that_fails, "a small model raises"),
    "a name is gone": (missing_method, "Found no `keras.src.saving.saving_lib."),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_a_change_of_keras_is_refused(untested, change, message):
    change(untested)
    init = keras.layers.Layer.__init__
    for _ in range(2):  # it was no accident, so it is said again
        with pytest.raises(HookError, match=re.escape(message)):
            tfamp.enable("mixed_bfloat16")
    assert not tfamp.status().enabled
    assert keras.layers.Layer.__init__ is init


def test_a_call_that_keras_puts_between_is_made(untested):
    made = []

    def __call__(self, *args, **kwargs):
        made.append(type(self))
        return super(TFLayer, self).__call__(*args, **kwargs)

    untested.setattr(TFLayer, "__call__", __call__, raising=False)
    with tfamp.scope("mixed_float16"):
        y = keras.layers.LayerNormalization()(np.ones((2, 4)))
    assert keras.layers.LayerNormalization in made
    assert y.dtype == "float16"


def test_the_error_names_the_versions_and_the_way_out(untested, monkeypatch):
    call_without_super(untested)
    message = (
        "Found Keras 9.0, on which the output of LayerNormalization is not cast to "
        "float16. tfamp was tested with Keras 3.10.0, 3.15.1: `pip install "
        "keras==3.15.1`. To go on with this version all the same, set "
        "TFAMP_UNTESTED_KERAS=1 in the environment."
    )
    with pytest.raises(HookError, match=re.escape(message)):
        tfamp.enable("mixed_float16")
    monkeypatch.setenv("TFAMP_UNTESTED_KERAS", "1")
    monkeypatch.setattr(hooks, "SELF_TEST", SelfTest("9.0"))
    with tfamp.scope("mixed_float16"):
        assert keras.layers.Dense(1).compute_dtype == "float16"


def test_a_tested_keras_is_not_asked():
    assert not any(SelfTest(version).is_due for version in versions.TESTED_KERAS)


def numbers_and_names():
    keras.utils.set_random_seed(7)
    yield keras.layers.Dense(2).name
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    yield from (model.name, model.layers[0].name, keras.optimizers.SGD().name)
    yield [w.tolist() for w in model.get_weights()]
    yield (tf.random.normal((2,)).numpy().tolist(), random.random(), np.random.rand())
    yield keras.config.dtype_policy().name


def test_it_leaves_seeds_names_and_policy_alone(untested):
    asked, (state, hooks.SELF_TEST.is_due) = hooks.SELF_TEST, (random.getstate(), False)
    keras.utils.clear_session()
    before = list(numbers_and_names())
    keras.utils.clear_session()
    asked.is_due = True
    random.setstate(state)
    assert list(numbers_and_names()) == before
    assert not asked.is_due


@pytest.mark.parametrize("version, told", [("2.9.1", 1), ("2.90", 0)])
def test_enabling_names_the_known_fault_of_a_keras(monkeypatch, caplog, version, told):
    monkeypatch.setattr(versions, "BAD_KERAS", {"2.9.": "loses every second batch"})
    installed = {**versions.installed_versions(), "keras": version}
    monkeypatch.setattr(versions, "installed_versions", lambda: installed)
    monkeypatch.setattr(versions, "check_environment", lambda: None)
    with caplog.at_level("INFO", logger="tfamp"):
        tfamp.enable("float32")
    assert caplog.text.count("Keras 2.9.1 loses every second batch.") == told
    assert caplog.text.count("`pip install 'keras==3.15.1'`") == told
    tfamp.disable()


def test_the_same_versions_of_keras_stand_everywhere():
    first, *_, last = versions.TESTED_KERAS
    makefile, setup = ((ROOT / name).read_text() for name in ("Makefile", "setup.cfg"))
    assert f'"keras=={first}"' in makefile
    assert f'"keras=={last}"' in makefile
    minimum = first.rpartition(".")[0]
    assert f"keras>={minimum}\n" in setup
    readme = " ".join((ROOT / "README.md").read_text().split())
    tested = " and ".join(versions.TESTED_KERAS)
    assert f"Keras {minimum} and later with the TensorFlow backend" in readme
    assert f"tested with Keras {tested}" in readme
    hooks_of_keras = (ROOT / "tfamp/keras_hooks/__init__.py").read_text()
    assert f"Checked against Keras {tested}" in " ".join(hooks_of_keras.split())
