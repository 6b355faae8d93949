"""Integers that users hand to an exported model arrive as they are, or are refused."""

import re

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

# The first integer that float32 has not; a user's number; the largest that int64 has.
ODD = 2**24 + 1


def passed_on(dtype):
    """A model that gives its input back beside an answer."""
    x = keras.Input((1,), dtype=dtype, name="number")
    same = layers.Identity(dtype=dtype)(x)
    answer = layers.Dense(1)(layers.Rescaling(1e-9)(x))
    return keras.Model(x, {"same": same, "answer": answer})


@pytest.fixture(scope="module")
def of_floats(tmp_path_factory):
    path = tmp_path_factory.mktemp("floats") / "m"
    return tfamp.export(passed_on("float32"), path, format="saved_model").load()


@pytest.mark.quick("16777217-int32")
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("number", [ODD, 123456789, 2**31 - 1])
def test_an_integer_that_the_input_would_round_is_refused(number, dtype, of_floats):
    x = np.array([[3], [number]], dtype)
    rounded = int(np.float32(number))
    text = f"holds {number}, which float32 rounds to {rounded};"
    with pytest.raises(TypeError, match=re.escape(text)) as caught:
        of_floats.predict(x)
    assert ".astype('float32')" in str(caught.value)
    found = of_floats.predict(x.astype("float32"))["same"]
    np.testing.assert_array_equal(found, [[3.0], [rounded]])


@pytest.mark.quick("9223372036854775807")
@pytest.mark.parametrize("number", [2**63 - 1, 2**64 - 1])
def test_the_largest_integers_are_no_floats_either(number, of_floats):
    dtype = "int64" if number < 2**63 else "uint64"
    with pytest.raises(TypeError, match=f"holds {number}, which float32 rounds"):
        of_floats.predict(np.array([[number]], dtype))


@pytest.mark.quick("int32")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_go_through_an_input_of_integers_as_they_are(dtype, tmp_path):
    model = passed_on(dtype)
    loaded = tfamp.export(model, tmp_path / "m", format="saved_model").load()
    for given in ("int32", "int64"):
        x = np.array([[ODD], [2**31 - 1], [-ODD]], given)
        found = loaded.predict(x)["same"]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, x)
    with pytest.raises(TypeError, match=f"is of dtype float64; expected {dtype}"):
        loaded.predict(np.array([[float(ODD)]]))
