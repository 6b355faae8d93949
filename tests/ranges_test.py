"""`tfamp.ranges`: how large the numbers of a model are, and what formats would hold."""

import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, assembled
from tfamp.numerics.magnitudes import Exponents, best_loss_scale, first_overflow, ranges
from tfamp.numerics.range_records import LOW_FORMATS, Ranges
from tfamp.records.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FORMATS

L = keras.layers
FEW = (FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)


def counted(*values):
    found = Exponents()
    found.add(np.array(values, np.float32))
    return found


@pytest.mark.parametrize("format", FEW, ids=lambda format: format.name)
@pytest.mark.parametrize("seed", range(3))
def test_shares_are_those_of_a_cast(format, seed):
    """Against TensorFlow's own cast of each number."""
    rng = np.random.default_rng(seed)
    values = np.float32(2.0 ** rng.uniform(-45, 25, 20000)) * rng.choice([-1, 1], 20000)
    values = values.astype(np.float32)
    cast = tf.cast(tf.cast(values, format.name), tf.float32).numpy()
    normal = np.abs(values) >= format.smallest_normal
    expected = (
        np.mean(~np.isfinite(cast)),
        np.mean(cast == 0),
        np.mean(~normal & (cast != 0)),
    )
    found = counted(*values).in_format(format)
    # Numbers are told apart to a sixteenth of a power of two, at each of two limits.
    numbers_in_a_bin = 1.5 / 16 / 70
    assert found.overflow == pytest.approx(expected[0], abs=numbers_in_a_bin)
    assert found.zero == pytest.approx(expected[1], abs=numbers_in_a_bin)
    assert found.coarse == pytest.approx(expected[2], abs=2 * numbers_in_a_bin)


def test_the_largest_number_of_a_format_does_not_overflow():
    for name in LOW_FORMATS:
        format = FORMATS[name]
        assert counted(format.max).in_format(format).overflow == 0, name
        beyond = np.float32(first_overflow(format) * (1 + 2.0**-20))
        assert counted(beyond).in_format(format).overflow == 1, name


def test_zeros_and_what_is_not_finite_are_counted_apart():
    found = counted(0.0, -0.0, np.nan, np.inf, -np.inf, 2.0)
    assert (found.count, found.zeros, found.nonfinite, found.usable) == (6, 2, 3, 1)
    assert (found.smallest, found.largest) == (2.0, 2.0)
    assert found.by_exponent() == {1: 1}
    assert counted(0.0).in_format(FLOAT16).total == 0


def test_two_counts_together_are_the_count_of_both():
    both = counted(1.0, 0.0, 3.0, np.nan)
    one, other = counted(1.0, 0.0), counted(3.0, np.nan)
    one.merge(other)
    assert one.by_exponent() == both.by_exponent()
    assert (one.count, one.zeros, one.nonfinite) == (4, 1, 1)
    assert (one.smallest, one.largest) == (1.0, 3.0)


@pytest.mark.parametrize("power", [-30, -20, -5, 3, 14])
def test_the_best_scale_brings_gradients_into_range(power):
    rng = np.random.default_rng(0)
    found = counted(*(2.0 ** rng.uniform(power - 12, power, 1000)))
    best, (low, high) = best_loss_scale(found)
    assert low <= best <= high
    shares = found.in_format(FLOAT16, best)
    assert shares.overflow == 0
    if -14 - 12 <= power - 12 - 24 or power >= -24:
        assert shares.total == 0 or best in (2.0**24, 2.0**-14)


def test_one_overflow_costs_more_than_all_that_vanishes():
    # At a scale of 2**6 the large one is past 65504, the others are still 0.
    found = counted(2.0**10, *[2.0**-31] * 999)
    best, (_, high) = best_loss_scale(found)
    assert best <= high == 2.0**5
    assert found.in_format(FLOAT16, high).zero == 0.999


def model_of(style="sequential"):
    parts = [
        L.Dense(4, kernel_initializer="ones", name="first"),
        L.Rescaling(1e6, name="large"),
        L.Rescaling(1e-6, name="small"),
        L.Dense(1, kernel_initializer="ones", name="head"),
    ]
    model = assembled(parts, style, (2,))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


DATA = (np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([[0], [0], [0]]))


@pytest.mark.quick("float32-nested", "mixed_bfloat16-subclassed")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_ranges_are_those_by_hand_and_nothing_changes(style, policy):
    with tfamp.scope(policy):
        model = model_of(style)
    model(DATA[0])
    before = [w.copy() for w in model.get_weights()]
    dtypes = [row.compute_dtype for row in tfamp.assignment(model)]
    found = ranges(model, DATA)
    prefix = "inner/" if style == "nested" else ""
    by = {(layer.path, layer.kind): layer for layer in found.layers}
    first = by[f"{prefix}first", "activations"]
    assert (first.smallest, first.largest) == (3.0, 11.0)
    assert first.count == 12
    large = by[f"{prefix}large", "activations"]
    assert large.largest == pytest.approx(11e6)
    assert large.fit("float16").overflow == 1.0
    assert large.fit("bfloat16").overflow == 0.0
    # The loss is the mean of (4 * sum)^2; its derivative by the head's output is
    # 2 * 4 * sum / 3, and the layers behind it pass that times 1e-6 on.
    head = by["head", "gradients"]
    assert head.largest >= 8 * 11 / 3
    large = by[f"{prefix}large", "gradients"]
    assert large.largest == pytest.approx(8 * 11 / 3 * 1e-6, rel=1e-4)
    assert large.smallest == pytest.approx(8 * 3 / 3 * 1e-6, rel=1e-4)
    assert by[f"{prefix}first", "weights"].zeros == 4
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [row.compute_dtype for row in tfamp.assignment(model)] == dtypes
    assert Ranges.from_json(found.to_json()) == found


def test_the_table_and_the_plot_show_each_layer(tmp_path):
    pytest.importorskip("matplotlib")
    found = ranges(model_of(), DATA)
    text = str(found)
    for layer in found.layers:
        assert layer.path in text
    assert max(map(len, text.splitlines())) <= 110
    assert "Gradients fit float16 best with a loss scale of" in text
    found.plot(tmp_path / "ranges.png")
    assert (tmp_path / "ranges.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "ranges.png").stat().st_size > 10_000


def test_an_unknown_format_is_refused():
    layer = ranges(model_of(), DATA).layers[0]
    message = "`format` is 'float64'; expected one of ('float16', 'bfloat16',"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.fit("float64")


def test_as_many_batches_are_looked_at_as_asked_for():
    found = ranges(model_of(), DATA, batch_size=1, num_batches=2)
    assert found.num_batches == 2
    by = {(layer.path, layer.kind): layer for layer in found.layers}
    assert by["first", "activations"].largest == 7.0
    assert math.isfinite(found.best_loss_scale)


def test_a_model_that_is_not_compiled_is_refused():
    with pytest.raises(ValueError, match="is not compiled"):
        ranges(keras.Sequential([keras.Input((2,)), L.Dense(1)]), DATA)
