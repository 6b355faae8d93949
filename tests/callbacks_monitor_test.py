"""`PrecisionMonitor`: what it puts into logs, files and warnings, and what it costs."""

import csv
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.callbacks import PrecisionMonitor, monitor
from tfamp.callbacks._fit_callback import BAR_AVERAGES

INF = float("inf")
BAD_STEP = 3  # of the six steps in an epoch, counted from 1
# A scale of 8 that halves at a skipped step and doubles after three finite ones:
# two epochs of six steps, the third of each skipped.
# What it is after four steps, six, ten and twelve; each gradient's norm is 8**0.5.
ROWS = {
    "step": [4, 6, 10, 12],
    "loss_scale": [4, 8, 4, 8],
    "applied_steps": [3, 5, 8, 10],
    "skipped_steps": [1, 1, 2, 2],
    "consecutive_skips": [0, 0, 0, 0],
    "gradient_norm": [8**0.5] * 4,
    "overflow_rate": [250.0, 166.667, 200.0, 166.667],
}
HEADER = [*ROWS]
KEYS = HEADER[1:]

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def compiled(*, compiling=None, **options):
    """A model of two weights of 0, with a learning rate of 0: norms stay the same."""
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), 8.0, dynamic_growth_steps=3, **options
    )
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="d")
    model = keras.Sequential([keras.Input((2,)), layer], name="m")
    model.compile(optimizer, "mse", **(compiling or {"run_eagerly": True}))
    return model


def data(num_steps=6, bad=BAD_STEP):
    """Batches of two examples, each step's gradient [-2, -2]; one is not finite."""
    x, y = np.ones((2 * num_steps, 2), "float32"), np.ones((2 * num_steps, 1))
    if bad is not None:
        y[2 * bad - 1] = INF
    return x, y


def fit(model, *callbacks, arrays=None, epochs=2, **settings):
    x, y = data() if arrays is None else arrays
    settings = {"batch_size": 2, "shuffle": False, "verbose": 0} | settings
    history = model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings)
    return history.history


def rows(path):
    """Columns of a CSV file as numbers, None for an empty cell."""
    with open(path, newline="") as file:
        header, *lines = csv.reader(file)
    assert header == HEADER
    numbers = [[float(cell) if cell else None for cell in line] for line in lines]
    return dict(zip(header, map(list, zip(*numbers, strict=True)), strict=True))


def events(folder):
    """What TensorBoard reads: (step, tag) -> value, and the plug-ins named."""
    found, plugins = {}, set()
    for path in sorted(folder.glob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor).item()
                found[event.step, value.tag] = number
                plugins.add(value.metadata.plugin_data.plugin_name)
    return found, plugins


WAYS = {
    "XLA": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "three steps a call": {"steps_per_execution": 3},
}


@pytest.mark.quick("eager", "three steps a call")
@pytest.mark.parametrize("compiling", WAYS.values(), ids=WAYS)
def test_logs_and_rows_hold_every_reading(compiling, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "_EVERY", 4)
    path = tmp_path / "steps.csv"
    watch = PrecisionMonitor(csv_path=path)
    history = fit(compiled(compiling=compiling), watch)
    assert {key: history[key] for key in KEYS} == {
        "loss_scale": [8.0, 8.0],
        "applied_steps": [5, 10],
        "skipped_steps": [1, 2],
        "consecutive_skips": [0, 0],
        "gradient_norm": pytest.approx([8**0.5, 8**0.5]),
        "overflow_rate": [166.667, 166.667],
    }
    # Three steps a call are read behind the first call that has the fourth.
    in_calls = {"step": [6, 12]} | {k: ROWS[k][1::2] for k in KEYS}
    expected = in_calls if "steps_per_execution" in compiling else ROWS
    for key, values in rows(path).items():
        assert values == pytest.approx(expected[key]), key


def test_scalars_are_those_of_the_rows(tmp_path):
    watch = PrecisionMonitor(tmp_path / "new" / "events")
    fit(compiled(), watch)
    values, plugins = events(tmp_path / "new" / "events")
    assert plugins == {"scalars"}
    rows_at = {6: 1, 12: 3}
    found = {(step, k): values.pop((step, k)) for step in rows_at for k in KEYS}
    assert not values
    assert found == pytest.approx(
        {(s, k): ROWS[k][i] for s, i in rows_at.items() for k in KEYS}
    )


def test_the_progress_bar_shows_two_of_the_numbers(capsys):
    history = fit(compiled(), PrecisionMonitor(), verbose=1, epochs=1)
    line = capsys.readouterr().out.splitlines()[-1]
    assert "loss_scale: 8.0000" in line and "skipped_steps: 1.0" in line
    assert not any(name in line for name in ("applied", "consecutive", "norm", "rate"))
    assert {*KEYS} <= {*history}


@pytest.mark.skipif(BAR_AVERAGES, reason="the bar would show means of them")
def test_the_bar_shows_them_while_an_epoch_runs():
    shown = []
    after = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: shown.append(logs.get("loss_scale"))
    )
    fit(compiled(), PrecisionMonitor(), after, epochs=1)
    assert shown == [8.0] * 6  # as it was read before the first step


def test_steps_before_an_error_are_not_lost(tmp_path):
    model, path = compiled(max_consecutive_skips=2), tmp_path / "steps.csv"
    watch = PrecisionMonitor(csv_path=path)
    x, y = data()
    y[6:] = INF
    with pytest.raises(tfamp.LossScaleError):
        fit(model, watch, arrays=(x, y))
    assert rows(path)["consecutive_skips"] == [2]
    fit(model, watch, epochs=1)
    assert rows(path)["step"] == [4, 10]


def test_variables_are_named_once_for_each_set(caplog):
    dense = keras.layers.Dense(1, name="d")
    model = keras.Sequential([keras.Input((1,)), dense], name="m")
    model.compile(
        tfamp.LossScaleOptimizer(keras.optimizers.SGD(), 1.0, dynamic=False), "mse"
    )
    watch = PrecisionMonitor()
    watch.set_model(model)
    watch.on_train_begin()
    watch.on_epoch_begin(0)

    def steps(*pairs):
        for kernel, bias in pairs:
            gradients = [tf.constant([[kernel]]), tf.constant([bias])]
            model.optimizer.apply(gradients, model.trainable_variables)
        watch.on_epoch_end(0)

    steps((1.0, 1.0), (INF, 1.0), (1.0, 1.0))
    (warning,) = caplog.messages
    assert warning.startswith(
        "Skipped 1 of the 3 steps up to step 3: gradients of 'm/d/kernel' were "
        "not finite. The loss scale is 1 now."
    )
    steps((INF, 1.0))
    assert len(caplog.messages) == 1
    steps((INF, 1.0), (INF, float("nan")))
    assert "Skipped 2 of the 2 steps up to step 6" in caplog.messages[1]
    assert "gradients of 'm/d/kernel', 'm/d/bias' were not finite" in caplog.messages[1]
    assert len(caplog.messages) == 2


def test_another_optimizer_is_refused_before_training(tmp_path):
    model = compiled()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    remedy = "`tfamp.LossScaleOptimizer(optimizer, initial_scale=1, dynamic=False)`"
    with pytest.raises(TypeError, match=re.escape(remedy)):
        fit(model, PrecisionMonitor(csv_path=tmp_path / "steps.csv"))
    assert list(tmp_path.iterdir()) == []
    assert model.optimizer.iterations == 0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_a_policy_that_scales_no_loss_leaves_nothing_to_show(policy, tmp_path, caplog):
    with tfamp.scope(policy):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = fit(model, PrecisionMonitor(csv_path=tmp_path / "steps.csv"))
    assert "loss_scale" not in history
    assert list(tmp_path.iterdir()) == []
    assert "shows and writes nothing" in caplog.text
    assert model.optimizer.iterations > 0


WRONG_PATHS = {
    "no folder": ("csv_path", "none/a.csv", "No such file or directory"),
    "other columns": ("csv_path", "file", "whose first line is 'time,loss'; expected"),
    "no text": ("csv_path", "image", "which cannot be written ("),
    "no place": ("log_dir", "file/b", "which cannot be written ("),
}


@pytest.mark.parametrize("argument, path, text", WRONG_PATHS.values(), ids=WRONG_PATHS)
def test_a_wrong_path_is_said_before_training(argument, path, text, tmp_path):
    (tmp_path / "file").write_text("time,loss\n")
    (tmp_path / "image").write_bytes(b"\x89PNG\n")
    model, given = compiled(), str(tmp_path / path)
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        fit(model, PrecisionMonitor(**{argument: given}))
    assert str(error.value).startswith(f"`{argument}` is {given!r}")
    assert model.optimizer.applied_steps == 0
    assert (tmp_path / "file").read_text() == "time,loss\n"
