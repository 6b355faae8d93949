"""`Throughput`: rates in logs and files, the wait for input; training is the same."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.callbacks_monitor_test import events
from tests.clocks import Ticks
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tests.styles import Subclassed
from tfamp.callbacks import Throughput, _rates
from tfamp.callbacks import _timed_iterator as timed
from tfamp.callbacks._fit_callback import BAR_AVERAGES
from tfamp.callbacks._rates import Window, rates_of
from tfamp.machine import speeds

# 22 examples in batches of 4 are five of 4 and one of 2.
NUM_EXAMPLES, BATCH = 22, 4
KEYS = ("examples_per_second", "step_seconds", "input_wait")
FIELDS = ["step", *KEYS, "model_flops_utilisation"]
WAIT = 0.25  # seconds of each draw, by the fake clock in the graph


@pytest.fixture(autouse=True)
def graph_clock(monkeypatch):
    """Lets each draw in a graph take a quarter of a second."""
    ticks = tf.Variable(0.0, dtype=tf.float64)

    def now(*, after):
        with tf.control_dependencies(after):
            return ticks.assign_add(WAIT).read_value()

    monkeypatch.setattr(timed, "_now", now)


class TracedSlowly(keras.Model):
    """Takes a hundred seconds of a clock to trace its step."""

    clock = None
    num_traces = 0

    def train_step(self, data):
        self.num_traces += 1
        if self.clock is not None:
            self.clock.now += 100
        return super().train_step(data)


def functional(kind=keras.Model):
    inputs = keras.Input((2,))
    return kind(inputs, keras.layers.Dense(3, use_bias=False)(inputs))


def subclassed():
    return Subclassed([keras.layers.Dense(3, use_bias=False)])


def sequential():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False)])


MODELS = {"Functional": functional, "Sequential": sequential, "subclassed": subclassed}


def compiled(make=sequential, **settings):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(settings.pop("optimizer", "sgd"), "mse", **settings)
    return model


def arrays(num_examples=NUM_EXAMPLES):
    x = np.arange(2 * num_examples, dtype="float32").reshape(-1, 2) / 100
    return x, np.ones((num_examples, 3), "float32")


def fit(model, *callbacks, data=None, epochs=2, **settings):
    x, y = arrays() if data is None else (data, None)
    settings = {"shuffle": False, "verbose": 0} | settings
    if data is None:
        settings |= {"batch_size": BATCH}
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **settings).history


def rows(path):
    with open(path, newline="") as file:
        header, *lines = csv.reader(file)
    assert header == FIELDS
    return [[float(cell) if cell else None for cell in line] for line in lines]


# The first of six steps is left out of the first epoch: 18 examples in 5 s, then 22
# in 6 s.
EXPECTED = {
    "examples_per_second": [18 / 5, 22 / 6],
    "step_seconds": [1.0, 1.0],
    "input_wait": [WAIT, WAIT],
}


@pytest.mark.parametrize("every_steps", [1, 4, 100])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rates_of_each_epoch_are_in_the_history(make, every_steps):
    rate = Throughput(clock=Ticks(), every_steps=every_steps)
    history = fit(compiled(make), rate)
    for key in KEYS:
        assert history[key] == pytest.approx(EXPECTED[key]), key
    # From before the first call to after it, and once more when the device is done.
    assert history["first_step_seconds"] == [rate.first_step_seconds] == [2.0]


def dataset(*, drop_remainder=False, kind=None):
    made = tf.data.Dataset.from_tensor_slices(arrays())
    made = made.batch(BATCH, drop_remainder=drop_remainder)
    if kind == "dict":
        return made.map(lambda x, y: ({"a": x}, y))
    if kind == "weights":
        return made.map(lambda x, y: (x, y, tf.ones(tf.shape(y)[0])))
    if kind == "unknown length":
        return made.filter(lambda x, y: True)
    return made


def by_name():
    inputs = keras.Input((2,), name="a")
    return keras.Model({"a": inputs}, keras.layers.Dense(3)(inputs))


DATA = {
    "tuple": (sequential, {}),
    "dict": (by_name, {}),
    "weights": (sequential, {}),
    "unknown length": (sequential, {}),
    "class weights": (sequential, {"class_weight": {0: 2.0, 1: 1.0, 2: 1.0}}),
}


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_examples_are_counted_in_batches_of_every_form(kind):
    make, settings = DATA[kind]
    history = fit(
        compiled(make), Throughput(clock=Ticks()), data=dataset(kind=kind), **settings
    )
    expected = EXPECTED["examples_per_second"]
    assert history["examples_per_second"] == pytest.approx(expected)


WAYS = {
    "XLA": {"jit_compile": True},
    "three steps a call": {"steps_per_execution": 3},
    "eager": {"run_eagerly": True},
}


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_examples_and_steps_are_right_however_the_step_runs(settings):
    rate = Throughput(clock=Ticks())
    history = fit(compiled(**settings), rate)
    if "steps_per_execution" not in settings:
        assert history["examples_per_second"] == pytest.approx([18 / 5, 22 / 6])
        assert history["step_seconds"] == [1.0, 1.0]
        return
    # A call is a second of three steps; the second call holds 4 + 4 + 2 examples.
    assert history["examples_per_second"] == pytest.approx([10.0, 22 / 2])
    assert history["step_seconds"] == pytest.approx([1 / 3, 1 / 3])
    assert "input_wait" not in history
    assert (
        "No input_wait, since with `steps_per_execution` above 1 a batch is drawn "
        "while the model computes: ask `tfamp.data.bottleneck`."
    ) in rate.notes


@pytest.mark.parametrize("steps", [1, 3])
def test_examples_of_all_replicas_are_counted_together(steps):
    strategy = two_replicas()
    with strategy.scope():
        model = compiled(steps_per_execution=steps)
    history = fit(model, Throughput(clock=Ticks()))
    expected = [18 / 5, 22 / 6] if steps == 1 else [10.0, 11.0]
    assert history["examples_per_second"] == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_training_is_the_same_to_the_last_bit_and_draws_no_more(tmp_path):
    def trained(*callbacks):
        drawn = []

        def generate():
            for x, y in zip(*arrays(), strict=True):
                drawn.append(1)
                yield x, y

        spec = (tf.TensorSpec((2,)), tf.TensorSpec((3,)))
        data = tf.data.Dataset.from_generator(generate, output_signature=spec)
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        model = compiled(optimizer="adam")
        fit(model, *callbacks, data=data.batch(BATCH).with_options(options))
        return model.get_weights()[0], len(drawn)

    plain, num_plain = trained()
    ours, num_ours = trained(Throughput(csv_path=tmp_path / "rates.csv"))
    np.testing.assert_array_equal(plain, ours)
    assert num_ours == num_plain


def test_rows_and_scalars_hold_every_window(tmp_path):
    rate = Throughput(
        log_dir=tmp_path / "events",
        csv_path=tmp_path / "rates.csv",
        every_steps=2,
        clock=Ticks(),
        flops_per_example=10,
        peak_flops=400,
    )
    fit(compiled(), rate)
    # step, examples/s, seconds a step, wait, 10 * examples/s / 400
    assert rows(tmp_path / "rates.csv") == [
        [3, 4.0, 1.0, WAIT, 0.1],
        [5, 4.0, 1.0, WAIT, 0.1],
        [6, 2.0, 1.0, WAIT, 0.05],
        [8, 4.0, 1.0, WAIT, 0.1],
        [10, 4.0, 1.0, WAIT, 0.1],
        [12, 3.0, 1.0, WAIT, 0.075],
    ]
    found, _ = events(tmp_path / "events")
    assert found[12, "examples_per_second"] == 3.0
    assert found[12, "model_flops_utilisation"] == pytest.approx(0.075)
    assert len(found) == 6 * 4


def test_a_second_fit_goes_on_counting_and_traces_nothing_anew(tmp_path):
    model = compiled(lambda: functional(TracedSlowly))
    rate = Throughput(csv_path=tmp_path / "rates.csv", clock=Ticks())
    fit(model, rate, epochs=1)
    traced = model.num_traces
    again = fit(model, rate, epochs=1)
    fit(model, Throughput(), epochs=1)
    assert model.num_traces == traced
    assert [row[0] for row in rows(tmp_path / "rates.csv")] == [6, 12]
    # The first step of every `fit` is told apart.
    assert again["examples_per_second"] == pytest.approx([18 / 5])
    assert again["first_step_seconds"] == [2.0]


def test_tracing_is_told_apart_and_left_out_of_the_rates_now_and_later():
    model = compiled(lambda: functional(TracedSlowly))
    model.clock = clock = Ticks()

    class Forget(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.make_train_function(force=True)

    history = fit(model, Forget(), Throughput(clock=clock))
    assert history["first_step_seconds"][0] > 100
    assert history["step_seconds"] == [1.0, 1.0]
    assert history["examples_per_second"] == pytest.approx([18 / 5, 18 / 5])


class Slow(keras.callbacks.Callback):
    """Takes an hour of a clock at each end."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def on_epoch_end(self, epoch, logs=None):
        self.clock.now += 3600

    on_test_begin = on_test_end = lambda self, logs=None: self.on_epoch_end(0)


@pytest.mark.parametrize("kind", [None, "unknown length"])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_validation_and_ends_of_epochs_are_left_out(kind):
    clock = Ticks()
    history = fit(
        compiled(),
        Slow(clock),
        Throughput(clock=clock),
        data=dataset(kind=kind),
        validation_data=dataset(),
    )
    for key in KEYS:
        assert history[key] == pytest.approx(EXPECTED[key]), key


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_last_window_is_over_before_validation(tmp_path):
    path, found = tmp_path / "rates.csv", []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            found.append(rows(path)[-1][0])

    fit(
        compiled(),
        Throughput(csv_path=path),
        Look(),
        data=dataset(kind="unknown length"),
        validation_data=dataset(),
    )
    assert found == [6, 12]


class Seen(keras.callbacks.Callback):
    """Keeps what a callback later in the list sees."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(set(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(set(logs))


def test_callbacks_after_it_see_the_rates():
    seen = Seen()
    fit(compiled(), Throughput(every_steps=2, clock=Ticks()), seen, epochs=1)
    assert set(KEYS) <= seen.epochs[0]
    assert not set(KEYS) & seen.batches[0]  # no window is over yet
    assert set(KEYS) <= seen.batches[-1] or BAR_AVERAGES


def test_the_second_of_two_rests_and_says_so():
    first, second = Throughput(clock=Ticks()), Throughput(clock=Ticks())
    history = fit(compiled(), first, second)
    assert history["examples_per_second"] == pytest.approx([18 / 5, 22 / 6])
    text = "No rates, since another Throughput measures the same `fit`: use one."
    assert (text in first.notes, text in second.notes) == (False, True)


class Interrupted(keras.callbacks.Callback):
    """Ends training between two steps."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            raise InterruptedError


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_fit_without_it_after_an_error_is_left_alone(tmp_path):
    model = compiled()
    model.make_train_function()
    function = model.train_function
    rate = Throughput(csv_path=tmp_path / "rates.csv", every_steps=1)
    with pytest.raises(InterruptedError):
        fit(model, rate, Interrupted())
    before = len(rows(tmp_path / "rates.csv"))
    fit(model)
    assert model.train_function is function
    assert len(rows(tmp_path / "rates.csv")) == before == 1
    # And with it the next one is measured as ever.
    assert len(fit(model, rate)["examples_per_second"]) == 2


class Scalars(keras.Model):
    """Trains on single numbers."""

    def train_step(self, data):
        return {"loss": tf.cast(data, tf.float32)}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_batches_that_cannot_be_counted_want_their_size():
    data, rate = tf.data.Dataset.range(6), Throughput(clock=Ticks())
    history = fit(compiled(lambda: functional(Scalars)), rate, data=data)
    assert "examples_per_second" not in history
    assert history["step_seconds"] == [1.0, 1.0]
    text = (
        "No examples_per_second, since batches have no first dimension to count: pass "
        "`batch_size`."
    )
    assert text in rate.notes
    given = Throughput(clock=Ticks(), batch_size=5)
    history = fit(compiled(lambda: functional(Scalars)), given, data=data)
    assert history["examples_per_second"] == [5.0, 5.0]


LEAVES = {
    "ragged": (tf.ragged.constant([[1.0], [2.0, 3.0, 4.0], []]), 3),
    "sparse": (tf.sparse.from_dense([[1.0, 0], [0, 1], [1, 1], [0, 0]]), 4),
    "a number first": ((tf.constant(1.0), tf.zeros((5, 2))), 5),
    "nothing first": ((None, tf.zeros((6,))), 6),
    "numbers only": ((tf.constant(1.0),), 0),
}


@pytest.mark.parametrize("data, expected", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_examples_are_rows_of_the_first_tensor_that_has_some(data, expected, in_graph):
    meter = timed.Meter(tf.distribute.get_strategy())
    count = tf.function(meter._examples_of) if in_graph else meter._examples_of
    assert int(count(data)) == expected


UNKNOWN = {
    "ragged": (tf.RaggedTensorSpec([None, None]), LEAVES["ragged"]),
    "sparse": (tf.SparseTensorSpec([None, None]), LEAVES["sparse"]),
    "dense": (tf.TensorSpec(None), (tf.zeros((7, 2)), 7)),
}


@pytest.mark.parametrize("spec, pair", UNKNOWN.values(), ids=UNKNOWN)
def test_rows_are_counted_where_a_graph_does_not_know_their_number(spec, pair):
    meter = timed.Meter(tf.distribute.get_strategy())
    count = tf.function(meter._examples_of, input_signature=[spec])
    data, expected = pair
    assert int(count(data)) == expected


class Pipeline:
    """Batches that take a while to make, two of them ahead; and a device beside.

    The host asks for a batch, gets it when it is made, and goes on at once; the
    device computes one batch after the other.
    """

    def __init__(self, make_seconds, compute_seconds):
        self.make_seconds, self.compute_seconds = make_seconds, compute_seconds
        self.host = self.device = 0.0
        self.begin()

    def begin(self):
        """Starts an epoch, with empty buffers."""
        self.made, self.taken = self.host, [self.host, self.host]

    def clock(self):
        return self.host

    def sync(self):
        self.host = max(self.host, self.device)

    def get_next(self):
        self.made = max(self.made, self.taken[-2]) + self.make_seconds
        self.host = max(self.host, self.made)
        self.taken.append(self.host)
        return tf.zeros((BATCH, 1))

    def train(self, iterator):
        iterator.get_next()
        self.device = max(self.device, self.host) + self.compute_seconds
        return {}


class Bare:
    """As much of a model as a watch looks at."""

    steps_per_execution = 1
    distribute_strategy = tf.distribute.get_strategy()

    def __init__(self, function):
        self.train_function = function


class Iterator(tf.data.Iterator):
    """An iterator over a simulated pipeline."""

    element_spec = tf.TensorSpec((BATCH, 1))
    _type_spec = tf.TensorSpec(())

    def __init__(self, pipeline):
        self.get_next = pipeline.get_next

    get_next = get_next_as_optional = __next__ = None


def watched(pipeline, num_calls, *, iterator=None, reads_logs=False, **settings):
    """The windows of two epochs on a simulated device."""

    def train(iterator):
        return pipeline.train(iterator) or ({"loss": 0.0} if reads_logs else {})

    model, windows, firsts = Bare(train), [], []
    meter = timed.Meter(model.distribute_strategy, clock=pipeline.clock)
    _rates._METERS[model] = meter
    watch = _rates.Watch(
        model,
        every_steps=10,
        clock=pipeline.clock,
        wait_for_device=pipeline.sync,
        on_window=lambda window, steps: windows.append(window),
        on_first_step=lambda seconds, spec: firsts.append(seconds),
        **{"batch_size": None, "is_asynchronous": True} | settings,
    )
    iterator = iterator or Iterator(pipeline)
    for _ in range(2):
        pipeline.begin()
        watch.begin_epoch(num_calls)
        for _ in range(num_calls):
            watch.call(model.train_function, iterator)
            if reads_logs:
                pipeline.sync()  # as `fit` does for its callbacks
        pipeline.host += 3600  # other callbacks at the end of the epoch
        watch.end_window()
    return watch, windows, firsts


# Seconds to make and to compute a batch, and the part of the time that is waited.
AHEAD = {
    "input slower": (5.0, 2.0, 3 / 5),
    "model slower": (2.0, 5.0, 0.0),
    "input much slower": (20.0, 1.0, 19 / 20),
}
# The buffers begin empty and the last step is waited for, of forty each.
EDGES = 0.05


@pytest.mark.parametrize("reads_logs", [False, True], ids=["no logs", "logs"])
@pytest.mark.parametrize("make, compute, expected", AHEAD.values(), ids=AHEAD)
def test_a_device_that_is_still_busy_does_not_wait(make, compute, expected, reads_logs):
    _, windows, firsts = watched(Pipeline(make, compute), 41, reads_logs=reads_logs)
    rates = rates_of(windows)
    assert rates.input_wait == pytest.approx(expected, abs=EDGES)
    assert rates.step_seconds == pytest.approx(max(make, compute), rel=EDGES)
    assert firsts == [make + compute]


def test_windows_end_on_an_idle_device_and_hold_every_batch():
    _, windows, _ = watched(Pipeline(1.0, 3.0), 44)
    # The first epoch is short of its first step; the second's first stands alone.
    assert [window.batches for window in windows] == [10] * 4 + [3, 1] + [10] * 4 + [3]
    # A batch is waited for once at most, and nothing after the last one is.
    assert all(0 <= w.seconds - 3.0 * w.batches <= 1.0 for w in windows)


def test_where_logs_are_read_every_step_begins_on_an_idle_device():
    _, windows, _ = watched(Pipeline(5.0, 3.0), 41, reads_logs=True)
    assert [window.batches for window in windows] == [10] * 8 + [1]
    # All waits are added up: a step makes 5 s, of which the model takes 3.
    assert [window.wait_seconds for window in windows[1:4]] == [20.0] * 3


def test_an_iterator_of_another_kind_is_counted_by_calls():
    class Other:
        get_next = staticmethod(lambda: None)

    pipeline = Pipeline(1.0, 3.0)
    watch, windows, _ = watched(pipeline, 11, iterator=Other(), is_asynchronous=False)
    assert watch.has_foreign_iterator
    assert [window.batches for window in windows] == [10, 10, 1]
    assert windows[0].examples is windows[0].wait_seconds is None


MEDIANS = {
    "one window": ([(6.0, 3)], 2.0),
    "each stands for its steps": ([(1.0, 1), (20.0, 10), (1.0, 1)], 2.0),
    "the middle": ([(1.0, 1), (3.0, 1), (2.0, 1)], 2.0),
    "an outlier": ([(2.0, 1)] * 9 + [(100.0, 1)], 2.0),
}


@pytest.mark.parametrize("pairs, expected", MEDIANS.values(), ids=MEDIANS)
def test_the_median_step_is_one_that_half_of_the_steps_do_not_exceed(pairs, expected):
    windows = [Window(seconds, batches, None, None) for seconds, batches in pairs]
    assert rates_of(windows).step_seconds == expected


def test_no_time_gives_no_rates():
    assert rates_of([]) is None
    assert rates_of([Window(0.0, 1, 1, 0.0), Window(1.0, 0, 0, 0.0)]) is None


def test_what_one_window_does_not_know_the_epoch_does_not():
    rates = rates_of([Window(1.0, 1, 4, 0.5), Window(1.0, 1, None, None)])
    assert rates == (None, 1.0, None, None)
    assert rates.known() == {"step_seconds": 1.0}


def test_more_than_all_of_the_time_is_not_waited():
    assert rates_of([Window(1.0, 1, 1, 1.5)]).input_wait == 1.0


def test_flops_are_counted_where_the_peak_is_given():
    # 2 * 2 * 3 forward, three times that to train, 4 examples/s.
    data = dataset(drop_remainder=True)
    rate = Throughput(clock=Ticks(), peak_flops=1000)
    history = fit(compiled(), rate, data=data)
    assert history["model_flops_utilisation"] == pytest.approx([36 * 4 / 1000] * 2)


def test_flops_that_cannot_be_counted_are_asked_for():
    def generate():
        for length in (2, 3, 4):
            yield np.ones((4, length), "f4"), np.ones((4, 1), "f4")

    spec = (tf.TensorSpec((4, None)), tf.TensorSpec((4, 1)))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    rate = Throughput(clock=Ticks(), peak_flops=1000)
    first = keras.layers.Lambda(lambda x: x[:, :1], output_shape=(1,))
    model = compiled(lambda: keras.Sequential([first, keras.layers.Dense(1)]))
    with pytest.warns(UserWarning, match="ran out of data"):
        history = fit(model, rate, data=data, epochs=1)
    assert "model_flops_utilisation" not in history
    assert rate.notes == (
        "No model_flops_utilisation, since the size of an example is not fixed: pass "
        "`flops_per_example`.",
    )


def fake_gpus(monkeypatch, *names):
    gpus = [tf.config.PhysicalDevice(name, "GPU") for name in names]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    config, details = tf.config.experimental, lambda gpu: {"device_name": gpu.name}
    monkeypatch.setattr(config, "get_device_details", details)


def test_the_peak_is_that_of_the_gpu_in_the_dtype_of_most_weights(monkeypatch):
    fake_gpus(monkeypatch, "NVIDIA A100-SXM4-40GB")
    wide = keras.layers.Dense(64, dtype="mixed_bfloat16")
    head = keras.layers.Dense(1, dtype="float32")
    model = keras.Sequential([keras.Input((8,)), keras.Sequential([wide]), head])
    assert _rates.compute_dtype_of(model) == "bfloat16"
    assert _rates.peak_of_devices(model) == (312e12, "")
    with two_replicas().scope():
        model = keras.models.clone_model(model)
    assert _rates.peak_of_devices(model) == (2 * 312e12, "")


@pytest.mark.parametrize("allowed, peak", [(True, 156e12), (False, 19.5e12)])
def test_float32_means_tfloat32_where_that_is_allowed(allowed, peak, monkeypatch):
    fake_gpus(monkeypatch, "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(
        tf.config.experimental, "tensor_float_32_execution_enabled", lambda: allowed
    )
    assert _rates.peak_of_devices(sequential()) == (peak, "")


NO_PEAK = {
    "CPU": ((), "the peak of a CPU is not known"),
    "two kinds": (("Tesla T4", "NVIDIA A10"), "the GPUs differ: NVIDIA A10, Tesla T4"),
    "not in the table": (
        ("NVIDIA A10G",),
        "the peak of NVIDIA A10G in float16 is not in the table",
    ),
}


@pytest.mark.parametrize("names, why", NO_PEAK.values(), ids=NO_PEAK)
def test_a_peak_that_is_not_known_is_none_with_its_reason(names, why, monkeypatch):
    fake_gpus(monkeypatch, *names)
    half = keras.layers.Dense(1, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((8,)), half])
    assert _rates.peak_of_devices(model) == (None, why)


# Figures as printed in NVIDIA's datasheets, dense.
PEAKS = {
    "V100 SXM": ("Tesla V100-SXM2-16GB", "float16", 125e12),
    "V100 PCIe": ("Tesla V100-PCIE-32GB", "float16", 112e12),
    "V100S": ("Tesla V100S-PCIE-32GB", "float16", 130e12),
    "V100 has no bfloat16": ("Tesla V100-SXM2-16GB", "bfloat16", None),
    "T4": ("Tesla T4", "float16", 65e12),
    "A10": ("NVIDIA A10", "bfloat16", 125e12),
    "A10G is another": ("NVIDIA A10G", "bfloat16", None),
    "A100": ("NVIDIA A100 80GB PCIe", "float16", 312e12),
    "L4": ("NVIDIA L4", "float16", 121e12),
    "L40S": ("NVIDIA L40S", "bfloat16", 362e12),
    "L40 is another": ("NVIDIA L40", "bfloat16", None),
    "H100 SXM": ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
    "H100 PCIe": ("NVIDIA H100 PCIe", "bfloat16", 756e12),
    "H100 NVL": ("NVIDIA H100 NVL", "bfloat16", 835.5e12),
    "H200": ("NVIDIA H200", "float16", 989.5e12),
    "GH200 is another": ("NVIDIA GH200 480GB", "float16", None),
    "two of seven": ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", "float16", 312e12 * 2 / 7),
    "of a slice": ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "float16", 989.5e12 / 7),
}


@pytest.mark.parametrize("name, dtype, expected", PEAKS.values(), ids=PEAKS)
def test_peaks_are_those_of_the_datasheets(name, dtype, expected):
    assert speeds.peak_flops(name, dtype) == (expected and pytest.approx(expected))


test_wrong_arguments_are_named = refused_arguments(
    Throughput,
    ("csv_path", 3, ", of type int; expected a path.", TypeError),
    ("every_steps", 0, "; expected an integer of at least 1."),
    ("batch_size", 2.5, ", of type float; expected an integer", TypeError),
    ("batch_size", 0, "; expected an integer of at least 1."),
    ("flops_per_example", -1.0, "; expected a finite number above 0."),
    ("peak_flops", "much", ", of type str; expected a number.", TypeError),
)
