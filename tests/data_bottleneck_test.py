"""`tfamp.stepping.input_waits`: verdicts, turns, epochs, and a model left as it was."""

import random
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.clocks import Ticks
from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp.stepping.input_waits import Timer, advice, bottleneck, feed, until_clear
from tfamp.stepping.input_waits.feed import (
    Excluded,
    Feed,
    Turn,
    exhaust,
    kept_batches,
    prepare,
    time_in_rounds,
)
from tfamp.stepping.input_waits.verdict import Bottleneck, judge
from tfamp.stepping.snapshots import named_variables
from tfamp.stepping.unchanged import unchanged

# Verdicts on times whose truth is set by construction ----------------------------


class Machine:
    """A pipeline that fetches ahead and a model, in simulated time.

    While both work on shared cores each goes at half its speed. Times vary by 10 %
    from call to call, and for a tenth of the time the machine is twice as slow.
    """

    def __init__(
        self, input_seconds, step_seconds, *, shared, depth=2, overhead=1e-4, seed=0
    ):
        self.now, self._overhead = 0.0, overhead
        self._input, self._step, self._depth = input_seconds, step_seconds, depth
        self._slowdown = 2.0 if shared else 1.0
        self._ahead = 0.0
        self._rng = np.random.default_rng(seed)
        # Spells of half a second.
        self._spells = self._rng.random(10_000) < 0.1

    def clock(self):
        return self.now

    def draw(self):
        """Waits for a batch; nothing else runs meanwhile."""
        if self._ahead >= 1:
            self._ahead -= 1
        else:
            self._pass((1 - self._ahead) * self._varied(self._input))
            self._ahead = 0.0
        self._pass(self._overhead)

    def step(self):
        """Computes; the pipeline goes on until enough is fetched ahead."""
        work, batch = self._varied(self._step), self._varied(self._input)
        while work > 1e-12:
            speed, last = 1.0, work
            if self._ahead < self._depth:
                speed = 1 / self._slowdown
                last = min(work, (self._depth - self._ahead) * batch)
                self._ahead = min(self._depth, self._ahead + last / batch)
            work -= last
            self._pass(last / speed)

    def real(self):
        self.draw()
        self.step()

    def judged(self):
        """What `bottleneck` would say, given eight seconds."""
        calls = {"input": self.draw, "real": self.real, "compute": self.step}
        turns = {name: Turn(call) for name, call in calls.items()}
        return until_clear(
            lambda seconds: time_in_rounds(turns, seconds=seconds, clock=self.clock),
            seconds=8,
            clock=self.clock,
        )[1]

    def _varied(self, seconds):
        return seconds * self._rng.lognormal(sigma=0.1)

    def _pass(self, seconds):
        self.now += seconds * (1 + self._spells[int(self.now * 2) % 10_000])


TRUTHS = {
    "slow map": ((0.010, 0.001), {"shared": False}, "input"),
    "slow map on the model's cores": ((0.010, 0.001), {"shared": True}, "input"),
    "slow step": ((0.001, 0.020), {"shared": False}, "compute"),
    "slow step on the map's cores": ((0.0005, 0.020), {"shared": True}, "compute"),
    "both, each on cores of its own": ((0.008, 0.010), {"shared": False}, "compute"),
    "both on the same cores": ((0.010, 0.010), {"shared": True}, "contention"),
    "neither": ((0.0002, 0.004), {"shared": False}, "compute"),
    "slow map, many ahead": ((0.010, 0.001), {"shared": False, "depth": 30}, "input"),
}


@pytest.mark.parametrize("times, options, truth", TRUTHS.values(), ids=TRUTHS)
def test_verdict_is_right_in_nine_of_ten_noisy_measurements(times, options, truth):
    verdicts = [
        Machine(*times, **options, seed=seed).judged().verdict for seed in range(40)
    ]
    assert verdicts.count(truth) >= 36
    # What is not right is unclear, never the opposite.
    assert set(verdicts) <= {truth, "unclear"}


GAINS = {
    "slow map": ((0.010, 0.002), False, 0.8),
    "no gain": ((0.001, 0.010), False, 0.0),
    "halves": ((0.010, 0.010), True, 0.5),
}


@pytest.mark.parametrize("times, shared, gain", GAINS.values(), ids=GAINS)
def test_possible_gain_is_the_constructed_one(times, shared, gain):
    judgement = Machine(*times, shared=shared, seed=1).judged()
    # Noise of 10 % over tens of rounds of several calls: some 2 %.
    assert judgement.gain == pytest.approx(gain, abs=0.06)
    assert judgement.gain_low <= judgement.gain <= judgement.gain_high


def test_a_gain_at_the_threshold_is_unclear():
    rng = np.random.default_rng(0)
    real = rng.lognormal(sigma=0.1, size=12)
    judgement = judge(real, 0.9 * rng.lognormal(sigma=0.1, size=12), 0.1 * real)
    assert judgement.verdict == "unclear"
    assert "10 % is where the input begins to matter" in judgement.reason


def test_a_small_gain_that_may_be_a_large_one_is_unclear():
    compute = [0.95, 0.98, 0.60, 0.96, 0.55, 0.97, 0.58]
    judgement = judge([1.0] * 7, compute, [0.1] * 7)
    assert judgement.gain == pytest.approx(0.05)
    assert judgement.gain_high > 0.1
    assert judgement.verdict == "unclear"


ROUNDS = ([20.0] * 7, [10.0] * 7, [10.0] * 7)
# Times of real steps, of the model and of the input alone; what a prefetch leaves of
# the gain; what they come to.
JUDGED = {
    "sharing is what the slower one does not explain": (
        ([10.0] * 5, [8.0] * 5, [1.0] * 5),
        None,
        {"lost_to_sharing": 0.2, "lost_to_input": 0},
    ),
    "beyond a slower input": (
        ([10.0] * 5, [2.0] * 5, [7.0] * 5),
        None,
        {"lost_to_sharing": 0.3, "lost_to_input": 0.5},
    ),
    "faster with the pipeline": (
        ([9.0] * 5, [10.0] * 5, [1.0] * 5),
        None,
        {"gain": 0, "gain_low": 0, "verdict": "compute"},
    ),
    "shared cores": (ROUNDS, None, {"verdict": "contention"}),
    "a prefetch regains it": (
        ROUNDS,
        [0.05] * 6,
        {"verdict": "input", "needs_prefetch": True},
    ),
    "a prefetch in vain": (
        ROUNDS,
        [0.4] * 6,
        {"verdict": "contention", "needs_prefetch": False},
    ),
    "a prefetch within the noise": (
        ROUNDS,
        [0.1, 0.9] * 3 + [0.1],
        {"verdict": "contention", "needs_prefetch": False},
    ),
}


@pytest.mark.parametrize("times, regained, expected", JUDGED.values(), ids=JUDGED)
def test_times_come_to_a_judgement(times, regained, expected):
    options = {} if regained is None else {"prefetched_gains": regained}
    judgement = judge(*times, **options)
    found = {name: getattr(judgement, name) for name in expected}
    assert found == {
        name: value if isinstance(value, str) else pytest.approx(value)
        for name, value in expected.items()
    }


def test_losses_that_are_equal_are_unclear():
    rng = np.random.default_rng(0)
    noise = rng.lognormal(sigma=0.05, size=(3, 12))
    judgement = judge(15 * noise[0], 5 * noise[1], 10 * noise[2])
    assert judgement.verdict == "unclear"
    assert judgement.gain == pytest.approx(2 / 3, abs=0.05)
    assert judgement.lost_to_input == pytest.approx(1 / 3, abs=0.05)
    assert judgement.lost_to_sharing == pytest.approx(1 / 3, abs=0.05)


def test_load_that_comes_and_goes_cancels_within_a_round():
    rng = np.random.default_rng(0)
    load = rng.choice([1.0, 3.0], size=20)
    judgement = judge(10 * load, 9.5 * load, 1 * load)
    assert judgement.gain == judgement.gain_low == judgement.gain_high
    assert judgement.gain == pytest.approx(0.05)
    assert judgement.verdict == "compute"


def test_a_verdict_that_is_unclear_gets_more_rounds_until_time_is_up():
    clock, asked = Clock(), []
    unclear = {"real": [1.0, 2.0] * 3, "compute": [1.0] * 6, "input": [0.5] * 6}
    clear = {"real": [1.0] * 30, "compute": [1.0] * 30, "input": [0.5] * 30}

    def judged(*answers):
        asked.clear()
        left = list(answers)

        def measure(seconds):
            asked.append(seconds)
            clock.now += seconds
            return left.pop(0)

        return until_clear(measure, seconds=8, clock=clock)

    times, judgement = judged(clear)
    assert (asked, times, judgement.verdict) == ([2], clear, "compute")
    times, judgement = judged(unclear, clear)
    assert (asked, judgement.verdict) == ([2, 2], "compute")
    assert times["real"] == [1.0, 2.0] * 3 + [1.0] * 30
    times, judgement = judged(*[unclear] * 9)
    assert (asked, judgement.verdict) == ([2, 2, 2, 2], "unclear")


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def taking(self, *seconds):
        """A call that takes so long: the first, the second, and the last for ever."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


CALLS = {
    "its first calls do not count": ([*[0.0] * 5, 0.5], 1.0, 2.0, 0.0),
    "it gives the mean of bursts": ([0.0, 1.0] * 100, 4.0, 20.0, 0.03),
}


@pytest.mark.parametrize("calls, warm, timed, tolerance", CALLS.values(), ids=CALLS)
def test_a_turn_times_its_calls(calls, warm, timed, tolerance):
    clock = Clock()
    turn = Turn(clock.taking(*calls))
    seconds = turn.seconds_per_call(clock, warm_seconds=warm, timed_seconds=timed)
    assert abs(seconds - 0.5) <= tolerance


def test_a_device_is_waited_for_after_each_long_call_and_once_for_short_ones():
    def calls_between_waits(seconds):
        clock, calls, waits = Clock(), [], []

        def call():
            clock.now += seconds
            calls.append(1)

        turn = Turn(call, lambda: waits.append(len(calls)))
        turn.seconds_per_call(clock, warm_seconds=0, timed_seconds=1)
        return int(np.diff(waits)[-1])

    assert calls_between_waits(0.1) == 1
    assert calls_between_waits(0.001) == 8


def test_a_turn_waits_for_the_device():
    clock, queued = Clock(), []

    def wait():
        clock.now += 0.25 * len(queued)
        queued.clear()

    turn = Turn(lambda: queued.append(1), wait)
    assert turn.seconds_per_call(clock, warm_seconds=1, timed_seconds=3) == 0.25


def test_what_is_excluded_is_in_no_mean():
    clock, excluded, calls = Clock(), Excluded(), []

    def call():
        calls.append(1)
        clock.now += 0.5
        if len(calls) % 4 == 0:
            clock.now += 100
            excluded.seconds += 100.5
            excluded.calls += 1

    turn = Turn(call, excluded=excluded)
    assert turn.seconds_per_call(clock, warm_seconds=2, timed_seconds=900) == 0.5


def test_each_round_has_every_turn_once():
    clock, calls = Clock(), []

    def timed(name, seconds):
        def call():
            clock.now += seconds
            if calls[-1:] != [name]:
                calls.append(name)

        return Turn(call)

    turns = {"a": timed("a", 0.01), "b": timed("b", 0.02)}
    times = time_in_rounds(turns, seconds=10, clock=clock, max_rounds=5)
    assert times == {"a": [pytest.approx(0.01)] * 5, "b": [pytest.approx(0.02)] * 5}
    assert calls == ["a", "b"] * 6


def test_a_round_without_a_counted_call_is_left_out():
    clock, excluded, calls = Clock(), Excluded(), []

    def call():
        clock.now += 1
        calls.append(1)
        if len(calls) <= 7:  # the first round begins epochs only
            excluded.calls += 1
            excluded.seconds += 1

    turns = {"a": Turn(clock.taking(1.0)), "b": Turn(call, excluded=excluded)}
    times = time_in_rounds(turns, seconds=1, clock=clock)
    assert times == {"a": [1.0] * 4, "b": [1.0] * 4}


def test_the_first_round_is_not_counted():
    clock = Clock()
    turns = {"a": Turn(clock.taking(*[1.0] * 7, 0.1))}
    times = time_in_rounds(turns, seconds=20, clock=clock)
    assert times == {"a": [pytest.approx(0.1)] * len(times["a"])}
    assert len(times["a"]) >= 5


def test_rounds_end_with_the_time_but_not_before_enough():
    def num_rounds(seconds):
        clock = Clock()
        turns = {"a": Turn(clock.taking(1.0))}
        return len(time_in_rounds(turns, seconds=seconds, clock=clock)["a"])

    # Seven calls of a second in a round, and the first round is left out.
    assert num_rounds(10) == 5
    assert num_rounds(70) == 9


def test_epoch_starts_are_timed_apart():
    clock = Clock()

    def begin():
        clock.now += 10
        return iter(range(100))

    source = Feed(begin, 5, clock=clock)
    for _ in range(12):
        source.call(lambda iterator: clock.taking(0.5)())
    # Calls 1, 6 and 11 begin an epoch.
    assert source.starts == [10.5] * 3
    assert source.excluded.calls == 3
    assert source.excluded.seconds == pytest.approx(31.5)


def test_what_a_device_still_does_is_no_part_of_an_epoch_start():
    clock, queued = Clock(), []

    def wait():
        clock.now += 0.5 * len(queued)
        queued.clear()

    source = Feed(lambda: iter(range(9)), 4, clock=clock, wait=wait)
    for _ in range(5):
        source.call(queued.append)
    # Twice the one step of the call that begins; the three between are not in it.
    assert source.starts == [0.5, 0.5]
    assert source.excluded.seconds == 1.0


def test_what_is_left_of_an_epoch_is_read():
    epochs = []

    def begin():
        epochs.append(iter(range(7)))
        return epochs[-1]

    source = Feed(begin, 3, clock=Clock())
    drawn = [source.call(next) for _ in range(7)]
    assert drawn == [0, 1, 2, 0, 1, 2, 0]
    assert [exhaust(epoch) for epoch in epochs] == [0, 0, 6]


def test_a_feed_that_was_closed_begins_anew():
    source = Feed(lambda: iter(range(9)), None, clock=Clock())
    assert [source.call(next) for _ in range(3)] == [0, 1, 2]
    source.close()
    assert source.call(next) == 0
    assert source.excluded.calls == 2


def sizes(source, number):
    return [int(batch.shape[0]) for batch in source.dataset.take(number)]


def numbers(n, size, **options):
    return tf.data.Dataset.range(n).batch(size, **options)


PREPARED = {
    "without the smaller last batch": (numbers(43, 8), 1),
    "none is smaller": (numbers(40, 8, drop_remainder=True), 1),
    "calls of two steps, rounded down": (numbers(83, 8), 2),
}


@pytest.mark.parametrize("data, steps", PREPARED.values(), ids=PREPARED)
def test_an_epoch_has_five_whole_calls(data, steps):
    source = prepare(data, steps)
    assert (source.calls_per_epoch, source.repeats) == (5, False)


def test_short_epochs_and_those_of_unknown_length_are_joined():
    short = prepare(numbers(20, 8), 1)
    unknown = prepare(numbers(43, 8).filter(lambda x: True), 1)
    for source in (short, unknown):
        assert (source.calls_per_epoch, source.repeats) == (None, True)
        assert sizes(source, 12) == [8] * 12


def test_a_single_smaller_batch_is_used_as_it_is():
    assert sizes(prepare(numbers(5, 8), 1), 3) == [5] * 3


def test_batches_of_buckets_all_stay():
    data = tf.data.Dataset.range(1, 21).map(lambda n: tf.range(n % 4 + 1))
    source = prepare(data.padded_batch(6), 1)
    assert sorted(set(sizes(source, 8))) == [2, 6]


def test_sparse_batches_all_stay():
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.eye(5, 3), tf.range(5)))
    batches = prepare(data.batch(2), 1).dataset.take(3)
    assert [int(y.shape[0]) for _, y in batches] == [2, 2, 1]


def test_an_endless_dataset_is_used_as_it_is():
    data = numbers(16, 8).repeat()
    source = prepare(data, 1)
    assert source.dataset is data
    assert (source.calls_per_epoch, source.repeats) == (None, False)


def test_kept_batches_are_a_few_and_come_from_memory():
    reads = []

    def read(x):
        reads.append(int(x))
        return x

    data = numbers(400, 4).map(lambda x: tf.numpy_function(read, [x[0]], tf.int64))
    # TensorFlow would map in parallel by itself, and read ahead.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    source = prepare(data.with_options(options), 1)
    kept = kept_batches(source, 1, batch_bytes=32)
    firsts = [0, 4, 8, 12, 16, 20, 24, 28]
    assert reads == firsts
    assert [int(x) for x in kept.take(24)] == firsts * 3
    assert reads == firsts


def test_no_more_batches_are_kept_than_memory_is_meant_for(monkeypatch):
    monkeypatch.setattr(feed, "_MAX_KEPT_BYTES", 100)
    for batch_bytes, firsts in {32: [0, 4, 8], 101: [0], 0: [0, 4, 8, 12, 16]}.items():
        source = prepare(numbers(400, 4), 1)
        kept = kept_batches(source, 1, batch_bytes=batch_bytes)
        assert [int(x[0]) for x in kept.take(5)] == (firsts * 5)[:5]


def test_a_smaller_last_batch_is_not_kept():
    source = prepare(numbers(43, 8), 1)
    kept = kept_batches(source, 1, batch_bytes=64)
    assert [int(x[0]) for x in kept.take(6)] == [0, 8, 16, 24, 32, 0]


# A real model, on a clock that ticks ---------------------------------------------


def pairs(n=40, batch=4):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def plainly(data, read):
    """`pairs` told to a function, batch by batch: nothing parallel, nothing ahead."""

    def told(x):
        read(x)
        return x

    data = data.map(lambda x, y: (tf.numpy_function(told, [x], x.dtype), y))
    data = data.map(lambda x, y: (tf.ensure_shape(x, (None, 3)), y))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return data.with_options(options)


def momentum():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def make_model(make_optimizer=momentum, *, policy="float32", **options):
    """Few weights, and every kind of state: statistics, a seed, slots, metrics."""
    with tfamp.scope(policy):
        model = keras.Sequential(
            [
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
    model.compile(make_optimizer(), "mse", metrics=["mae"], **options)
    return model


def plain_model(**options):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def measured(model, data):
    """What two rounds of turns give, the first of which is not counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "_MIN_ROUNDS", 1)
        return bottleneck(model, data, seconds=0.3, clock=Ticks(0.01))


def state(model):
    """The bits of every variable by path, on each replica."""
    variables = [named.variable for named in named_variables(model)]
    local = model.distribute_strategy.experimental_local_results
    bits = {
        variable.path: [part.numpy().tobytes() for part in local(variable.value)]
        for variable in variables
    }
    assert len(bits) == len(variables)
    return bits


WAYS = {
    "moving average": (lambda: keras.optimizers.Adam(use_ema=True), {}),
    "schedule, three steps a call": (
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9), momentum=0.9
        ),
        {"steps_per_execution": 3},
    ),
    "scale, xla": (lambda: tfamp.LossScaleOptimizer(momentum()), {"jit_compile": True}),
    "mixed_bfloat16": (momentum, {"policy": "mixed_bfloat16"}),
    "eager": (momentum, {"run_eagerly": True}),
}


@pytest.mark.parametrize("make_optimizer, options", WAYS.values(), ids=WAYS)
def test_a_trained_model_is_left_as_it_was_bit_by_bit(make_optimizer, options):
    model = make_model(make_optimizer, **options)
    model.fit(pairs(), verbose=0)
    before = state(model)
    result = measured(model, pairs())
    assert state(model) == before
    assert 0 <= result.possible_gain < 1
    rounds = len(result.times["real"])
    assert rounds == len(result.times["compute"]) == len(result.times["input"]) >= 1


def test_the_step_really_changes_what_is_put_back():
    model = make_model(keras.optimizers.Adam)
    model.fit(pairs(), verbose=0)
    before = state(model)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with unchanged(model):
        model.train_function(iter(pairs()))
        random.random()
        np.random.random()
        seen = state(model)
    changed = {name for name in before if before[name] != seen[name]}
    # Moving statistics, seed, slots, counters, metrics; weights stay, at rate 0.
    for word in ("moving_mean", "seed", "momentum", "iteration", "total"):
        assert any(word in name for name in changed), word
    assert changed.isdisjoint(weight.path for weight in model.trainable_variables)
    assert state(model) == before
    assert random.getstate() == python_state
    assert np.random.get_state()[2] == numpy_state[2]
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state[1])


def test_times_are_those_of_a_step_not_of_a_call():
    def seconds(steps):
        model = plain_model(steps_per_execution=steps)
        return measured(model, pairs().repeat()).compute_seconds

    assert seconds(2) == pytest.approx(seconds(1) / 2, rel=0.01)


def test_training_goes_on_as_if_nothing_had_been_measured():
    def train(measure):
        keras.utils.set_random_seed(1)
        model = make_model()
        model.fit(pairs(), verbose=0)
        if measure:
            measured(model, pairs())
        model.fit(pairs(), verbose=0)
        return [weights.tobytes() for weights in model.get_weights()]

    assert train(measure=True) == train(measure=False)


def test_an_unbuilt_model_is_built_and_otherwise_new():
    keras.utils.set_random_seed(1)
    model = make_model()
    measured(model, pairs())
    assert model.built
    assert model.optimizer.built
    assert int(model.optimizer.iterations) == 0
    slots = [v for v in model.optimizer.variables if "momentum" in v.path]
    assert slots
    assert all(not np.any(slot) for slot in slots)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    assert all(not np.any(v) for v in model.metrics_variables)
    keras.utils.set_random_seed(1)
    other = make_model()
    other.build((None, 3))
    for mine, new in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, new)


class Failing(keras.layers.Layer):
    """Raises in the step once the limit of calls is reached."""

    def __init__(self, limit):
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.limit = limit

    def call(self, x):
        self.calls.assign_add(1.0)
        check = tf.debugging.assert_less(self.calls.value, float(self.limit), "enough")
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(x)


def test_a_step_that_fails_leaves_the_model_as_it_was():
    model = keras.Sequential([Failing(30), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(pairs(), verbose=0)  # 10 calls, and one to build
    before = state(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="enough"):
        measured(model, pairs())
    assert state(model) == before


def test_two_replicas_are_measured_and_each_is_left_as_it_was(monkeypatch):
    strategy = two_replicas()
    with strategy.scope():
        model = make_model()
    model.fit(pairs(), verbose=0)
    before = state(model)
    # Their statistics come from examples of their own.
    assert any(parts[0] != parts[1] for parts in before.values())
    distribute, shared = strategy.experimental_distribute_dataset, []

    def spy(dataset):
        shared.append(dataset)
        return distribute(dataset)

    monkeypatch.setattr(strategy, "experimental_distribute_dataset", spy)
    result = measured(model, pairs())
    # The batches from memory, and at least one epoch: a half for each replica.
    assert len(shared) >= 2
    assert (result.batch_size, result.epoch_steps) == (4, 10)
    assert state(model) == before


def test_dict_inputs_with_sample_weights():
    inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((2,), name="b")}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse", weighted_metrics=["mae"])
    data = pairs().map(
        lambda x, y: ({"a": x[:, :1], "b": x[:, 1:]}, y, tf.ones_like(y[:, 0]))
    )
    result = measured(model, data)
    assert (result.batch_size, result.epoch_steps) == (4, 10)


SHORT = {"three batches": (12, 1), "less than a call": (4, 3)}


@pytest.mark.parametrize("examples, steps", SHORT.values(), ids=SHORT)
def test_a_dataset_of_few_batches(examples, steps):
    result = measured(plain_model(steps_per_execution=steps), pairs(examples))
    assert result.epoch_steps == examples // 4
    # Starts of epochs are in the times.
    assert result.epoch_start_seconds is None


class Pair(keras.Model):
    """Two layers, each with an optimizer, and only a train step."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(1), keras.layers.Dense(1)]
        self.optimizers = {
            "first": keras.optimizers.Adam(0.1, name="first"),
            "second": momentum(),
        }
        self.third = [keras.optimizers.Adam(0.1, name="third")]

    def train_step(self, data):
        x, y = data
        optimizers = [*self.optimizers.values()]
        for layer, optimizer in zip(self.parts, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(x) - y) ** 2)
            weights = layer.trainable_variables
            optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights, strict=True)
            )
        return {"loss": loss}


def test_optimizers_that_a_model_holds_itself_are_put_back():
    model = Pair()
    model.compile()
    model.third[0].build([])
    model.fit(pairs(), verbose=0)
    before = state(model)
    measured(model, pairs())
    after = state(model)
    for optimizer in model.optimizers.values():
        assert all(variable.path in before for variable in optimizer.variables)
    # The optimizer of `compile`, which this step leaves alone, was built meanwhile.
    assert {name: after[name] for name in before} == before


def test_state_that_only_the_train_step_would_make_is_an_error():
    model = Pair()
    model.compile()
    optimizers = [*model.optimizers.values(), *model.third]
    names = tuple(part.name for part in [*model.parts, *optimizers])
    message = (
        f"holds {names!r} without variables yet, and only its train step knows what "
        "they will be; expected layers and optimizers whose state can be put back."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        measured(model, pairs())


class Working(keras.layers.Layer):
    """Takes some time of a clock that only goes on when it is told to."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.seconds = clock, 0.0

    def call(self, x):
        def work(x):
            self.clock.now += self.seconds
            return x

        return tf.ensure_shape(tf.numpy_function(work, [x], x.dtype), x.shape)


@pytest.fixture(scope="module")
def clocked():
    """A clock, and a model whose step takes `model.layers[0].seconds` of it."""
    clock = Clock()
    model = keras.Sequential([Working(clock), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return clock, model


WHOLE = {
    "slow map": (0.020, 0.004, "input", 20 / 24),
    "slow step": (0.0002, 0.010, "compute", 0.2 / 10.2),
}


@pytest.mark.parametrize("load, work, verdict, gain", WHOLE.values(), ids=WHOLE)
def test_steps_and_batches_are_timed_in_their_places(
    clocked, load, work, verdict, gain
):
    clock, model = clocked
    first = next(iter(pairs()))[0].numpy()

    def read(x):
        clock.now += load + 1.0 * np.array_equal(x, first)

    model.layers[0].seconds = work
    result = bottleneck(model, plainly(pairs(80), read), seconds=0.2, clock=clock)
    assert min(map(len, result.times.values())) >= 5
    assert result.verdict == verdict
    assert result.possible_gain == pytest.approx(gain, abs=1e-6)
    assert result.compute_seconds == pytest.approx(work)
    assert result.input_seconds == pytest.approx(load)
    # The first batch of an epoch takes a second longer, and is in no step. Epochs
    # that begin in a turn of the pipeline alone lack the work of one.
    assert result.epoch_start_seconds == pytest.approx(1.0, abs=work + 1e-9)


def test_a_prefetch_is_tried_where_neither_alone_explains_the_step(monkeypatch):
    times = {"real": [20.0] * 6, "compute": [10.0] * 6, "input": [10.0] * 6}
    trial = {"prefetched": [10.5] * 6, "compute": [10.0] * 6}
    model = plain_model()
    monkeypatch.setattr(Timer, "measure", lambda self, seconds: dict(times))
    monkeypatch.setattr(Timer, "try_prefetch", lambda self, seconds: dict(trial))
    result = bottleneck(model, pairs())
    assert (result.verdict, result.possible_gain) == ("input", 0.5)
    assert result.times["prefetched"] == (10.5,) * 6
    assert result.advice.startswith("1. End the pipeline with `.prefetch(2)`")
    times["input"] = [1.0] * 6
    times["compute"] = [19.0] * 6
    # Nothing to regain, nothing to try.
    assert "prefetched" not in bottleneck(model, pairs()).times


def test_the_pipeline_that_is_tried_fetches_ahead(monkeypatch):
    third, drawn = threading.Event(), []

    def read(x):
        drawn.append(1)
        if len(drawn) >= 3:
            third.set()

    model = plain_model()
    timer = Timer(model, plainly(pairs(), read), batch_bytes=64, clock=Ticks(0.01))

    def once(turns, **options):
        drawn.clear()
        third.clear()
        turns["prefetched"].call()
        # One is for the step, two come by themselves.
        assert third.wait(timeout=60)
        return {"prefetched": [1.0], "compute": [1.0]}

    monkeypatch.setattr("tfamp.stepping.input_waits.time_in_rounds", once)
    assert timer.try_prefetch(1.0) == {"prefetched": [1.0], "compute": [1.0]}


def test_a_call_draws_the_batches_of_its_steps_unless_they_are_in_memory(monkeypatch):
    drawn = []
    model = plain_model(steps_per_execution=3)
    data = plainly(pairs(), drawn.append).repeat()
    timer = Timer(model, data, batch_bytes=64, clock=Ticks(0.01))

    def once(turns, **options):
        counts = {}
        for name, turn in turns.items():
            drawn.clear()
            turn.call()
            counts[name] = [float(len(drawn))]
        return counts

    monkeypatch.setattr("tfamp.stepping.input_waits.time_in_rounds", once)
    # One for each of the three steps of a call.
    assert timer.measure(1.0) == {"input": [1.0], "real": [1.0], "compute": [0.0]}


def test_ragged_batches_have_a_size():
    x = tf.RaggedTensor.from_row_lengths(tf.ones((12,)), [1, 2, 3, 4, 1, 1])
    data = tf.data.Dataset.from_tensor_slices((x, tf.ones((6, 1)))).batch(2)

    class Sums(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(tf.reduce_sum(x, axis=1)[:, None])

        def train_step(self, data):
            x, _ = data
            return {"loss": tf.reduce_mean(self(x))}

    model = Sums()
    model.dense.build((None, 1))
    model.built = True
    model.compile()
    result = measured(model, data)
    assert (result.batch_size, result.epoch_steps) == (2, 3)


def test_the_result_describes_epochs_and_batches():
    model = make_model()
    result = measured(model, pairs(43))
    assert (result.batch_size, result.epoch_steps) == (4, 11)
    assert result.epoch_start_seconds is not None
    assert result.epoch_start_seconds >= 0
    endless = measured(model, pairs().repeat())
    assert (endless.epoch_start_seconds, endless.epoch_steps) == (None, None)


def test_a_file_cache_is_whole_or_absent_afterwards(tmp_path):
    cache = str(tmp_path / "cache")
    measured(plain_model(), pairs().cache(cache))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert not any("lock" in name for name in left)
    # Training can use it, or write it anew.
    assert len(list(pairs().cache(cache))) == 10


# Records and advice --------------------------------------------------------------

RESULT = Bottleneck(
    verdict="input",
    possible_gain=0.8,
    gain_low=0.75,
    gain_high=0.85,
    reason="alone, the input takes 5.0 times as long as the model",
    advice="1. Cache.\n2. Map.",
    times={"real": (0.01, 0.011, 0.01), "compute": (0.002,) * 3, "input": (0.01,) * 3},
    batch_size=64,
    epoch_start_seconds=0.5,
    epoch_steps=100,
)


def test_the_record_comes_back_from_json():
    assert Bottleneck.from_json(RESULT.to_json()) == RESULT


def test_the_table_says_what_was_measured():
    text = str(RESULT)
    assert "3 rounds, batches of 64" in text
    assert "Verdict: input; alone, the input takes 5.0 times as long" in text
    assert "Possible gain: 80.0 % of a step (75.0 % to 85.0 %)." in text
    assert "6,400" in text  # 64 examples in 10 ms
    # Half a second before a hundred steps of 10 ms.
    assert "An epoch starts within 500 ms, 33.3 % of its 100 steps" in text
    assert text.endswith("1. Cache.\n2. Map.")
    assert max(map(len, text.splitlines()[:10])) <= 110


FACTS = advice.InputFacts(2**20, True, True, None, True, False, 1)
INPUT = judge([10.0] * 5, [2.0] * 5, [10.0] * 5)
UNFETCHED = judge([20.0] * 5, [10.0] * 5, [10.0] * 5, prefetched_gains=[0.0] * 5)
CONTENTION = judge([20.0] * 5, [10.0] * 5, [10.0] * 5)
COMPUTE = judge([10.0] * 5, [10.0] * 5, [1.0] * 5)
UNCLEAR = judge([1.0, 2.0] * 3, [1.0] * 6, [0.5] * 6)
EITHER = judge([15.0] * 6, [5.0] * 6, [9.0, 11.0] * 3)


def advised(judgement, *, step_seconds=0.05, epoch_start_share=None, **changes):
    facts = advice.InputFacts(**(vars(FACTS) | changes))
    return advice.advise(
        judgement, facts, step_seconds=step_seconds, epoch_start_share=epoch_start_share
    )


NOT = object()  # in front of what is not advised
ADVICE = {
    "uint8 first": (INPUT, {}, "1. Deliver images as uint8"),
    "no uint8 for tables": (INPUT, {"float_images": False}, "1. Cache"),
    "size of the cache": (INPUT, {}, "an epoch as delivered is 1.0 MiB, in memory."),
    "a large cache": (INPUT, {"total_bytes": 2**40}, "in a file on an SSD."),
    "parallel map": (INPUT, {}, "`num_parallel_calls`"),
    "autotune": (INPUT, {}, "autotune.enabled = False"),
    "prefetch first": (UNFETCHED, {}, "1. End the pipeline with `.prefetch(2)`"),
    "fewer threads": (CONTENTION, {}, "fewer threads than there are cores"),
    "fewer than its own": (CONTENTION, {"threads": 8}, "fewer threads than its 8"),
    "onto the device": (CONTENTION, {"on_cpu": False}, "onto the device"),
    "leave it": (COMPUTE, {}, "1. Leave the pipeline as it is"),
    "larger batches": (COMPUTE, {"step_seconds": 0.001}, "larger batches"),
    "xla": (COMPUTE, {}, "jit_compile=True"),
    "measure longer": (UNCLEAR, {}, "1. Measure longer"),
    "less input where a gain is sure": (EITHER, {}, "Cache"),
    "epoch starts": (COMPUTE, {"epoch_start_share": 0.3}, "starts with 30.0 %"),
    "autotune that is off": (INPUT, {"autotunes": False}, NOT, "autotun"),
    "prefetch in vain": (CONTENTION, {}, NOT, "prefetch"),
    "long steps": (COMPUTE, {}, NOT, "larger batches"),
    "short epoch starts": (COMPUTE, {"epoch_start_share": 0.01}, NOT, "epoch starts"),
    "less input where no gain is sure": (UNCLEAR, {}, NOT, "Cache"),
    "steps in a call there are": (
        COMPUTE,
        {"step_seconds": 0.001, "steps_per_execution": 16},
        *(NOT, "steps_per_execution"),
    ),
    "xla that is on": (COMPUTE, {"jit_compiled": True}, NOT, "jit_compile"),
    "one thread": (CONTENTION, {"threads": 1}, NOT, "fewer threads"),
}


@pytest.mark.parametrize("case", ADVICE.values(), ids=ADVICE)
def test_advice(case):
    judgement, options, *words = case
    assert (words[-1] in advised(judgement, **options)) is (words[0] is not NOT)


def test_facts_are_read_from_dataset_and_model():
    data = tf.data.Dataset.from_tensors((tf.zeros((2, 8, 8, 3)), tf.zeros((2, 1))))
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 3
    data = data.repeat(10).with_options(options)
    facts = advice.facts_of(
        data, make_model(jit_compile=True, steps_per_execution=2), batch_bytes=1544
    )
    assert facts == advice.InputFacts(15440, True, False, 3, facts.on_cpu, True, 2)


FLOAT_IMAGES = {
    "floats": ((tf.zeros((2, 8, 8, 3)), tf.zeros((2, 1))), True),
    "in a dict": ({"image": tf.zeros((2, 8, 8, 3)), "id": tf.zeros((2,))}, True),
    "bytes": ((tf.zeros((2, 8, 8, 3), tf.uint8), tf.zeros((2, 1))), False),
    "a table": ((tf.zeros((2, 8)), tf.zeros((2, 1))), False),
    "labels only": ((tf.zeros((2, 1)), tf.zeros((2, 8, 8, 3))), False),
}


@pytest.mark.parametrize("batch, expected", FLOAT_IMAGES.values(), ids=FLOAT_IMAGES)
def test_float_images_are_inputs_of_rows_and_columns(batch, expected):
    data = tf.data.Dataset.from_tensors(batch)
    facts = advice.facts_of(data, keras.Sequential(), batch_bytes=1)
    assert facts.float_images is expected


ERRORS = {
    "no model": (
        lambda: bottleneck(pairs(), make_model()),
        "expected a compiled `keras.Model`. Pass the model first, then the dataset.",
        TypeError,
    ),
    "not compiled": (
        lambda: bottleneck(keras.Sequential(name="plain"), pairs()),
        "Model 'plain' is not compiled; expected one that `fit` takes.",
    ),
    "lengths": (
        lambda: bottleneck(make_model(), (np.zeros(3), np.zeros(2))),
        "`dataset` holds arrays of shapes ((3,), (2,)); expected the same number",
    ),
    "rounds": (
        lambda: judge([1.0, 1.0], [1.0], [1.0, 1.0]),
        "`real`, `compute` and `input` have 2, 1 and 2 rounds; expected one number of "
        "at least 1. Pass the times of the same rounds.",
    ),
    "no rounds": (lambda: judge([], [], []), "have 0, 0 and 0 rounds"),
    "seconds": (
        lambda: bottleneck(make_model(), pairs(), seconds=0),
        "`seconds` is 0.0; expected a finite number above 0.",
    ),
}


test_errors = refusals(ERRORS)


def test_an_iterator_is_not_drawn_from():
    iterator = iter(pairs(8))
    message = "It can be read once only and would be used up: pass what it iterates, or"
    with pytest.raises(TypeError, match=re.escape(message)):
        bottleneck(make_model(), iterator)
    assert len(list(iterator)) == 2


# Real time -----------------------------------------------------------------------


def busy(x):
    """Work for some milliseconds on one core."""
    a = tf.random.stateless_uniform((64, 64), (1, 2))
    _, a = tf.while_loop(
        lambda i, a: i < 200, lambda i, a: (i + 1, tf.tanh(a @ a * 0.01)), (0, a)
    )
    return x + 0 * a[0, 0]


# The width of the model, whether the map is busy, the opposite of the truth, and
# where the possible gain lies even when half of the step is noise.
REAL = {
    "slow map": (16, True, ("compute",), (0.3, 1.0)),
    "slow step": (512, False, ("input", "contention"), (0.0, 0.3)),
    "both": (512, True, ("compute",), (0.05, 1.0)),
    "neither": (128, False, ("input", "contention"), (0.0, 0.3)),
}


@pytest.mark.parametrize("width, is_busy, opposite, gains", REAL.values(), ids=REAL)
def test_verdicts_on_real_datasets(width, is_busy, opposite, gains):
    """Many times as slow on one side, since the machine may be busy otherwise.

    What else it does may leave the verdict unclear, but not turn it round.
    """
    model = keras.Sequential([keras.layers.Dense(width) for _ in range(3)])
    model.add(keras.layers.Dense(1))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((64, 32)), tf.ones((64, 1))))
    data = data.repeat(500)
    if is_busy:
        data = data.map(lambda x, y: (busy(x), y), num_parallel_calls=2)
    result = bottleneck(model, data.prefetch(2), seconds=2)
    assert result.verdict not in opposite
    assert gains[0] <= result.possible_gain <= gains[1]
