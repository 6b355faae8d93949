"""A Keras that nobody has tested is asked first, and refused where it has changed."""

import contextlib
import functools
import gc
import inspect
import random
import re
import subprocess
import sys
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
from tfamp.dtypes.self_test import SelfTest
from tfamp.keras_hooks.backend import TensorFlowTrainer
from tfamp.keras_hooks.patches import HookError, like
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


def rewrite(changes, owner, name, before, after, **names):
    """Changes a few words in the source of one of Keras's functions."""
    function = vars(owner)[name]
    inner = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(inner))
    assert before in source
    scope = dict(inner.__globals__, **names)
    exec(source.replace(before, after), scope)
    changes.setattr(owner, name, scope[name])


def call_without_super(changes):
    to, names = "Operation.__call__(self, ", {"Operation": Operation}
    layer = keras.layers.Layer
    rewrite(changes, layer, "__call__", "super().__call__(", to, **names)


def operation_past_the_backend(name, changes):
    kernels = {
        "softmax": lambda x: tf.raw_ops.Softmax(logits=x),
        "log_softmax": lambda x: tf.raw_ops.LogSoftmax(logits=x),
        "sigmoid": lambda x: tf.raw_ops.Sigmoid(x=x),
    }
    changes.setattr(keras.ops, name, lambda x, axis=-1: kernels[name](x))


def wrapped_train_step(changes):
    cls, to = TensorFlowTrainer, "_make_function(lambda data: self.train_step(data))"
    before = "_make_function(self.train_step)"
    rewrite(changes, cls, "make_train_function", before, to)


def default_dtype_as_a_name(changes):
    init = keras.layers.Dense.__init__

    @like(init)
    def passed(self, *args, **kwargs):
        kwargs.setdefault("dtype", keras.config.floatx())
        init(self, *args, **kwargs)

    changes.setattr(keras.layers.Dense, "__init__", passed)


def file_without_the_entry(changes):
    inlined = saving_lib._serialize_model_as_json
    before, to = "_serialize_model_as_json(", "_inlined("
    function = "_save_model_to_fileobj"
    rewrite(changes, saving_lib, function, before, to, _inlined=inlined)


def missing_method(changes):
    changes.delattr(saving_lib, "_serialize_model_as_json")


def a_method_that_fails(changes):
    changes.delattr(keras.layers.BatchNormalization, "call")


CHANGES = {
    "no super().__call__": (call_without_super, "the output of LayerNormalization"),
    **{
        name: (
            functools.partial(operation_past_the_backend, name),
            f"`keras.ops.{name}` in a layer is not computed in float32",
        )
        for name in ("softmax", "log_softmax", "sigmoid")
    },
    "wrapped train_step": (wrapped_train_step, "a bad batch changes the model"),
    "dtype name": (default_dtype_as_a_name, "made without a dtype is not managed"),
    "another file": (file_without_the_entry, "a saved model does not hold"),
    "an error": (a_method_that_fails, "a small model raises ValueError: Layers added"),
    "a name is gone": (missing_method, "Found no `keras.src.saving.saving_lib."),
}


@pytest.mark.quick(
    "no super().__call__", "softmax", "log_softmax", "dtype name", "a name is gone"
)
@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_a_change_of_keras_is_refused(untested, change, message):
    change(untested)
    init = keras.layers.Layer.__init__
    with pytest.raises(HookError, match=re.escape(message)):
        tfamp.enable("mixed_bfloat16")
    assert not tfamp.status().enabled
    assert keras.layers.Layer.__init__ is init
    # It was no accident, so it is said again.
    with pytest.raises(HookError, match=re.escape(message)):
        tfamp.enable("mixed_bfloat16")


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


@pytest.mark.parametrize("version", versions.TESTED_KERAS)
def test_a_tested_keras_is_not_asked(version):
    assert not SelfTest(version).is_due


def test_applying_asks_too(untested):
    wrapped_train_step(untested)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(HookError, match="a bad batch changes the model"):
        tfamp.apply(model, "mixed_float16")
    assert model.layers[0].compute_dtype == "float32"


def numbers_and_names():
    keras.utils.set_random_seed(7)
    first = keras.layers.Dense(2)
    yield first.name
    with tfamp.scope("mixed_float16"):
        layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *layers])
    yield from (model.name, *(layer.name for layer in layers))
    yield from (keras.losses.MeanSquaredError().name, keras.optimizers.SGD().name)
    yield [w.tolist() for w in model.get_weights()]
    yield (tf.random.normal((2,)).numpy().tolist(), random.random(), np.random.rand())
    yield keras.random.normal((2,)).numpy().tolist()
    yield keras.config.dtype_policy().name
    yield tf.constant(0.0).device


@pytest.mark.quick("plain")
@pytest.mark.parametrize("where", ["plain", "strategy", "traced"])
def test_it_leaves_seeds_names_and_policy_alone(untested, where):
    @contextlib.contextmanager
    def surroundings():
        if where == "strategy":
            with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
                yield
        elif where == "traced":
            with tf.Graph().as_default():
                hooks.SELF_TEST.run()
            yield
        else:
            yield

    asked, (state, hooks.SELF_TEST.is_due) = hooks.SELF_TEST, (random.getstate(), False)
    keras.utils.clear_session()
    with surroundings():
        before = list(numbers_and_names())
    keras.utils.clear_session()
    asked.is_due = True
    random.setstate(state)
    with surroundings():
        assert list(numbers_and_names()) == before
    assert not asked.is_due


def test_nothing_of_it_stays_in_memory(untested):
    tfamp.enable("mixed_bfloat16")
    assert not hooks.SELF_TEST.is_due
    gc.collect()
    left = [each for each in gc.get_objects() if isinstance(each, keras.layers.Layer)]
    assert not [each.name for each in left if each.name.startswith("tfamp_")]


PROGRAM = """
import tensorflow as tf
import keras, tfamp
from tfamp.dtypes import hooks
from tfamp.dtypes.self_test import SelfTest
hooks.SELF_TEST = SelfTest("9.0")
tfamp.enable("mixed_bfloat16")
due = hooks.SELF_TEST.is_due
cpu = tf.config.list_physical_devices("CPU")[0]
one = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [one] * 2)
keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
print(due, hooks.SELF_TEST.is_due, len(tf.config.list_logical_devices("CPU")))
"""


@pytest.mark.slow("test_a_change_of_keras_is_refused asks once TensorFlow has started")
def test_devices_can_be_set_after_enable():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True False 2\n", done.stderr


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
    assert f"keras>={first.rpartition('.')[0]}\n" in setup
    minimum = ".".join(map(str, versions.KERAS_MINIMUM))
    assert first.startswith(f"{minimum}.")
    readme = " ".join((ROOT / "README.md").read_text().split())
    tested = " and ".join(versions.TESTED_KERAS)
    assert f"Keras {minimum} and later with the TensorFlow backend" in readme
    assert f"tested with Keras {tested}" in readme
    hooks_of_keras = (ROOT / "tfamp/keras_hooks/__init__.py").read_text()
    assert f"Checked against Keras {tested}" in " ".join(hooks_of_keras.split())


def test_each_set_of_versions_runs_each_night():
    makefile = (ROOT / "Makefile").read_text()
    nightly = (ROOT / ".github/workflows/whole.yml").read_text()
    sets = re.search(r"^VERSIONS \?= (.*)$", makefile, re.MULTILINE)[1].split()
    assert sets == ["newest", "oldest", "nightly"]
    for each in sets:
        assert f"test-whole-{each}:" in makefile
        assert re.search(rf"versions: .*\b{each}\b", nightly), each
    assert "keras-nightly" in makefile
