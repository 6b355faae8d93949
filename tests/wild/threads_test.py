"""Threads that build, load, train and count beside others that do so too."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
X, Y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")


def in_a_thread(function):
    with ThreadPoolExecutor() as pool:
        return pool.submit(function).result()


def made():
    return layers.Dense(1).compute_dtype, layers.UnitNormalization().compute_dtype


def test_each_of_two_threads_has_its_own_scope():
    inside, outside = threading.Barrier(2), threading.Barrier(2)
    found = {}

    def build(policy):
        with tfamp.scope(policy):
            inside.wait()
            found[policy] = made()
            outside.wait()
        found[f"{policy}, after"] = made()

    policies = ("mixed_float16", "mixed_bfloat16")
    init = keras.layers.Layer.__init__
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, policies))
    for policy in policies:
        assert found[policy] == (policy.removeprefix("mixed_"), "float32")
        assert found[f"{policy}, after"] == ("float32", "float32")
    assert keras.layers.Layer.__init__ is init
    assert not tfamp.status().enabled


def test_loading_in_two_threads_leaves_tfamp_enabled(tmp_path):
    with tfamp.scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.save(tmp_path / "model.keras")
    try:
        tfamp.enable("mixed_bfloat16")
        start = threading.Barrier(3)
        loaded = []

        def load():
            start.wait()
            loaded.append(tfamp.load_model(tmp_path / "model.keras"))

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        found = {made() for _ in range(200)}
        for thread in threads:
            thread.join()
        assert found == {("bfloat16", "float32")}
        assert tfamp.status().enabled and made() == ("bfloat16", "float32")
        assert len(loaded) == 2
    finally:
        tfamp.disable()


def test_a_thread_that_built_a_model_hears_of_disable():
    tfamp.enable("mixed_bfloat16")
    first, second, found = threading.Event(), threading.Event(), []

    def build():
        found.append(made())
        first.set()
        second.wait()
        found.append(made())
        found.append(keras.config.dtype_policy().name)

    thread = threading.Thread(target=build)
    thread.start()
    first.wait()
    tfamp.disable()
    second.set()
    thread.join()
    assert found == [("bfloat16", "float32"), ("float32", "float32"), "float32"]


def test_what_is_enabled_holds_in_threads_and_in_scopes_of_tasks():
    async def build(policy):
        with tfamp.scope(policy):
            await asyncio.sleep(0)
            found = made()
            await asyncio.sleep(0)
        return found

    async def both():
        return await asyncio.gather(build("mixed_float16"), build("mixed_bfloat16"))

    tfamp.enable("mixed_bfloat16")
    try:
        assert in_a_thread(made) == ("bfloat16", "float32")
        found = asyncio.run(both())
        assert found == [("float16", "float32"), ("bfloat16", "float32")]
        assert made() == ("bfloat16", "float32")
    finally:
        tfamp.disable()
    assert made() == ("float32", "float32")
