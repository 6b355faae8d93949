"""Limits of the number formats, against NumPy's, ml_dtypes' and hand-made figures."""

import ml_dtypes
import numpy as np
import pytest

from tfamp.records import formats

FORMATS = list(formats.FORMATS.values())
IDS = list(formats.FORMATS)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_limits_equal_those_of_ml_dtypes(format):
    oracle = ml_dtypes.finfo(format.name)
    assert format.max == float(oracle.max)
    assert format.smallest_normal == float(oracle.smallest_normal)
    assert format.smallest_subnormal == float(oracle.smallest_subnormal)
    assert format.epsilon == float(oracle.eps)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_spacing_is_the_distance_to_the_next_number(format):
    dtype = ml_dtypes.finfo(format.name).dtype
    generator = np.random.default_rng(0)
    exponents = generator.uniform(-9, 8, size=200)
    values = np.concatenate([[0.0, 1.0, 2.0], 2.0**exponents]).astype(dtype)
    values = np.unique(values[np.abs(values.astype(np.float64)) < format.max / 2])
    for value in values:
        after = float(np.nextafter(value, np.array(format.max, dtype)))
        assert formats.spacing(format, float(value)) == after - float(value)
        assert formats.spacing(format, -float(value)) == after - float(value)


def test_only_short_exponents_need_a_loss_scale():
    needing = {format.name for format in FORMATS if formats.needs_loss_scale(format)}
    assert needing == {"float16"}
