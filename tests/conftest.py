"""What every test gets: two CPU devices, and a check that Keras was left as found."""

import fnmatch
import gc
import os
import random
import signal
import sys

import pytest

from tfamp.machine import cpus

# Programs that the tests run; each is registered once, and none has a doctest.
collect_ignore_glob = ["wild/programs*"]

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.pop("TFAMP_POLICY", None)


def pytest_configure(config: pytest.Config) -> None:
    """Gives TensorFlow two CPU devices, which is only possible before it starts.

    Strategies of two replicas then run on any machine. One thread for the operations,
    as each core has a process of the suite. Where AMX ends a process, oneDNN does
    without it, in the processes that tests start too. Under pytest-xdist the controller
    runs no test and is spared the import. Ctrl-C is heard, as by what tests start, even
    where nohup or a shell's `&` had it ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cpus.avoid_broken_amx()
    is_controller = not hasattr(config, "workerinput")
    if is_controller and config.getoption("numprocesses", None):
        return
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases as slow that their test does not name as its quick ones."""
    for item in items:
        quick = item.get_closest_marker("quick")
        case = item.name.partition("[")[2].removesuffix("]")
        if quick and not any(is_case(case, pattern) for pattern in quick.args):
            item.add_marker(pytest.mark.slow)


def is_case(case: str, pattern: str) -> bool:
    """States whether a case is the one, or one of those, that a pattern names."""
    return case == pattern or fnmatch.fnmatchcase(case, pattern)


@pytest.fixture(autouse=True)
def keras_is_left_as_found():
    """Fails a test that leaves tfamp enabled or a global policy.

    Every test names its layers alike and draws the same initial weights, alone or after
    others: Keras takes their seeds from `random`. A seed that a test set for TensorFlow
    is forgotten, since a later test may be about what has none.
    """
    import keras
    import tensorflow as tf
    from keras.src.utils import naming

    naming.reset_uids()
    random.seed(0)
    yield
    left_policy = keras.config.dtype_policy().name
    # Restored before the check, so that one leak fails one test.
    if "tfamp.policy" in sys.modules:
        sys.modules["tfamp.policy"].disable()
        sys.modules["tfamp.keras_hooks.layers"].CALLS.float16_layers.clear()
    keras.config.set_dtype_policy("float32")
    tf.random.set_seed(None)
    assert left_policy == "float32"


@pytest.fixture
def without_float16():
    """Tapes keep more as long as layers in float16 live, as those of other tests do."""
    from tfamp.keras_hooks.layers import FLOAT16

    living = [*FLOAT16]
    FLOAT16.clear()
    yield
    FLOAT16.update(living)


@pytest.fixture(autouse=True)
def traced_steps_are_given_back():
    """Lets go of the graphs that TensorFlow would keep as long as the process lives.

    It registers the gradient of each function with a custom one, every reduction over
    replicas among them, under a name of its own and for ever: some megabytes a model.
    """
    from tensorflow.python.framework import ops

    yield
    registered = ops.gradient_registry._registry
    for name in [name for name in registered if name.startswith("CustomGradient-")]:
        del registered[name]


@pytest.fixture(autouse=True, scope="module")
def garbage_is_collected_while_it_is_young():
    """Collects what a file's tests leave, and leaves the rest out of later rounds.

    Freeing traced functions waits inside TensorFlow, the longer the older a process
    is: rounds of a minute were seen, with hardly any work in them.
    """
    yield
    gc.collect()
    gc.freeze()
