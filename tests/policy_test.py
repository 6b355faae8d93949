"""Enabling, disabling, scopes and status, in one thread and in several.

What they leave behind, and the errors.
"""

import asyncio
import concurrent.futures
import re
import threading
import warnings

import keras
import numpy as np
import pytest

import tfamp
from tfamp.machine import devices as hardware

layers = keras.layers


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    tfamp.disable()
    keras.config.set_dtype_policy("float32")


def dense():
    return layers.Dense(2).compute_dtype


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: layers.Dot(axes=-1, normalize=True), "float32"),
        (lambda: layers.Dot(axes=-1), "bfloat16"),
        (lambda: layers.AveragePooling2D(4), "float32"),
        (lambda: layers.AveragePooling2D(3), "bfloat16"),
        (lambda: layers.UpSampling2D(interpolation="bilinear"), "float32"),
        (lambda: layers.Dense(65), "float32"),
        (lambda: layers.Dense(64), "bfloat16"),
    ],
    ids=["cosine", "Dot", "4x4", "3x3", "bilinear", "wide", "narrow"],
)
def test_a_finished_layer_tells_at_once_what_depends_on_its_settings(make, dtype):
    wide = ["default", lambda layer: getattr(layer, "units", 0) > 64]
    tfamp.enable("mixed_bfloat16", keep_float32=wide)
    layer = make()
    assert layer.compute_dtype == dtype
    assert layer.dtype_policy.compute_dtype == dtype


def test_a_rule_may_read_the_dtype_it_decides_on():
    keep = [lambda layer: layer.compute_dtype == "bfloat16"]
    tfamp.enable("mixed_bfloat16", keep_float32=keep)
    assert dense() == "float32"


def elsewhere(function, *args):
    """Returns what a function gives in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def seen():
    """What a program sees of a policy: the global one, and two new layers."""
    kept = layers.LayerNormalization().compute_dtype
    return keras.config.dtype_policy().name, dense(), kept


STOCK = ("float32",) * 3
HALF = ("mixed_bfloat16", "bfloat16", "float32")


@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("stock", ["float32", "float64"])
def test_disable_gives_back_the_users_policy_in_every_thread(stock, in_thread):
    keras.config.set_dtype_policy(stock)
    before = keras.config.dtype_policy()
    tfamp.enable("mixed_bfloat16")
    elsewhere(tfamp.disable) if in_thread else tfamp.disable()
    assert keras.config.dtype_policy() == before
    assert in_thread or keras.config.dtype_policy() is before
    assert seen() == (stock,) * 3
    assert not tfamp.status().enabled
    keras.config.set_dtype_policy("float32")
    assert seen() == elsewhere(seen) == STOCK
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, "softmax")])
    assert model(np.ones((1, 2))).dtype == "float32"


def test_a_thread_that_built_a_layer_hears_of_disable():
    tfamp.enable("mixed_bfloat16")
    built, disabled = threading.Event(), threading.Event()

    def build():
        before = seen()
        built.set()
        disabled.wait()
        return before, seen()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(build)
        built.wait()
        tfamp.disable()
        disabled.set()
        assert found.result() == (HALF, STOCK)


def test_each_of_two_threads_has_its_own_scope():
    inside, outside = threading.Barrier(2), threading.Barrier(2)
    init = keras.layers.Layer.__init__

    def build(policy):
        with tfamp.scope(policy):
            inside.wait()
            found = seen()
            outside.wait()
        return found, seen()

    policies = ("mixed_float16", "mixed_bfloat16")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(build, policies))
    halves = [(policy, policy.removeprefix("mixed_"), "float32") for policy in policies]
    assert found == [(half, STOCK) for half in halves]
    assert keras.layers.Layer.__init__ is init
    assert not tfamp.status().enabled


def test_what_is_enabled_holds_in_threads_and_in_scopes_of_tasks():
    async def build(policy):
        with tfamp.scope(policy):
            await asyncio.sleep(0)
            found = dense()
            await asyncio.sleep(0)
        return found

    async def both():
        return await asyncio.gather(build("mixed_float16"), build("mixed_bfloat16"))

    tfamp.enable("mixed_bfloat16")
    assert elsewhere(seen) == HALF
    assert asyncio.run(both()) == ["float16", "bfloat16"]
    assert seen() == HALF


def test_loading_in_two_threads_leaves_tfamp_enabled(tmp_path):
    with tfamp.scope("mixed_bfloat16"):
        keras.Sequential([keras.Input((2,)), layers.Dense(1)]).save(
            tmp_path / "m.keras"
        )
    tfamp.enable("mixed_bfloat16")
    start = threading.Barrier(3)

    def load(_):
        start.wait()
        return tfamp.load_model(tmp_path / "m.keras")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loaded = pool.map(load, range(2))
        start.wait()
        found = {seen() for _ in range(200)}
        assert len(list(loaded)) == 2
    assert found == {HALF} == {seen()}
    assert tfamp.status().enabled


def test_scopes_nest_and_restore():
    tfamp.enable("float32")
    with tfamp.scope("mixed_bfloat16"):
        assert dense() == "bfloat16"
        with tfamp.scope("float32"):
            assert dense() == "float32"
        assert dense() == "bfloat16"
    assert dense() == "float32"
    assert tfamp.status().enabled


def test_enable_inside_a_scope_ends_with_it():
    with tfamp.scope("mixed_bfloat16"):
        tfamp.enable("float32")
        assert dense() == "float32"
    assert not tfamp.status().enabled
    with tfamp.scope("mixed_bfloat16"):
        tfamp.disable()
        assert dense() == "float32"
    assert not tfamp.status().enabled


def test_auto_takes_what_the_devices_compute_fast(monkeypatch):
    monkeypatch.setattr(
        hardware,
        "recommend",
        lambda devices: hardware.Recommendation("mixed_bfloat16", "because"),
    )
    status = tfamp.enable()
    assert (status.policy, status.why) == ("mixed_bfloat16", "because")
    assert status.reason == status.why


def test_an_explicit_policy_that_will_be_slow_is_obeyed_with_one_warning(monkeypatch):
    monkeypatch.setattr(
        hardware, "objection", lambda policy, devices: f"{policy} is slow here"
    )
    with pytest.warns(UserWarning, match="mixed_float16 is slow here") as caught:
        status = tfamp.enable("mixed_float16")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert status.policy == "mixed_float16"


REFUSED = {
    "policy": ({"policy": "fp16"}, "Unknown `policy` 'fp16'; expected "),
    **{
        f"loss scale {value}": (
            {"loss_scale": value},
            f"Unknown `loss_scale` {value!r}; expected 'dynamic'",
        )
        for value in (0, -1.0, float("inf"), "static", True)
    },
    "loss scale without effect": (
        {"loss_scale": 1024.0},
        "`loss_scale` 1024.0 has no effect under policy 'mixed_bfloat16'",
    ),
    "option": (
        {"loss_scale_options": {"groth": 2}},
        "Unknown `loss_scale_options` 'groth'",
    ),
    "options of a static scale": (
        {"loss_scale": 8.0, "loss_scale_options": {"initial_scale": 2.0}},
        "act on a dynamic loss scale only, but `loss_scale` is 8.0",
    ),
    "pattern": (
        {"keep_float32": ["default", "("]},
        "Cannot read pattern '(' in `keep_float32`",
    ),
    "number": ({"keep_float32": [3]}, "Cannot use 3 in `keep_float32`"),
    "foreign class": (
        {"keep_float32": [dict]},
        "Cannot use <class 'dict'> in `keep_float32`",
    ),
}


@pytest.mark.parametrize("settings, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_enabled_is_told_and_changes_nothing(settings, message):
    tfamp.enable("mixed_bfloat16")
    before = tfamp.status()
    is_type = settings.get("keep_float32") in ([3], [dict])
    with pytest.raises(TypeError if is_type else ValueError, match=re.escape(message)):
        tfamp.enable(**{"policy": "mixed_bfloat16", **settings})
    assert tfamp.status() == before


def test_a_model_built_before_enable_is_warned_of_once():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    tfamp.enable("mixed_bfloat16")
    message = f"Model '{model.name}' was built before `tfamp.enable`"
    with pytest.warns(UserWarning, match=re.escape(message)):
        model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(np.ones((2, 2)), np.ones((2, 2)), verbose=0)


@pytest.mark.parametrize("use", ["compile", "call"])
def test_a_model_put_together_outside_from_managed_layers_is_managed(use):
    with tfamp.scope("mixed_bfloat16"):
        x = keras.Input((2,))
        y = layers.Dense(2)(layers.Dense(2)(x))
    model = keras.Model(x, y)
    if use == "compile":
        model.compile("sgd", "mse")
    assert model(np.ones((1, 2))).dtype == "float32"
    assert tfamp.assignment(model).layers[-1].rule == "default: heads"


def test_status_prints_and_survives_json():
    tfamp.enable("mixed_bfloat16", keep_float32=["default", "ReLU"])
    status = tfamp.status()
    assert type(status).from_json(status.to_json()) == status
    text = str(status)
    assert "mixed_bfloat16" in text
    assert "default: heads" in text
