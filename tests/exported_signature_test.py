"""The signature of exported models, and how inputs are checked against it."""

import re
from pathlib import Path

import numpy as np
import pytest

from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec

ONE = Signature(
    (TensorSpec("x", (None, 2), "float32"),), (TensorSpec("y", (None, 2), "float32"),)
)
TWO = Signature(
    (TensorSpec("a", (None, 2), "float32"), TensorSpec("b", (None, None), "int32")),
    (TensorSpec("u", (None, 2), "float32"), TensorSpec("v", (None, None), "int32")),
)


class Echo(LoadedModel):
    """Gives its inputs back, under the names of its outputs."""

    def run(self, inputs):
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, inputs.values(), strict=True))


def echo(signature):
    return Echo("onnx", Path("."), signature, None)


def test_inputs_come_by_order_or_by_name():
    a, b = np.ones((3, 2), np.float64), np.arange(6).reshape(3, 2)
    by_order = echo(TWO).predict((a, b))
    by_name = echo(TWO).predict({"b": b, "a": a})
    for answer in (by_order, by_name):
        assert list(answer) == ["u", "v"]
        assert answer["u"].dtype == np.float32 and answer["v"].dtype == np.int32
        np.testing.assert_array_equal(answer["v"], b)


@pytest.mark.parametrize(
    ("signature", "x", "error", "text"),
    [
        (ONE, np.ones((2, 3)), ValueError, "is of shape (2, 3); expected (None, 2)"),
        (ONE, np.ones(2), ValueError, "`x[np.newaxis]`"),
        (ONE, np.array([["a", "b"]]), TypeError, "expected float32"),
        (ONE, [[1, 2], [3]], ValueError, "Pass rows of one length"),
        (ONE, {"z": np.ones((1, 2))}, ValueError, "Add ['x']. Leave out ['z']."),
        (TWO, np.ones((1, 2)), ValueError, "takes 2 inputs, ['a', 'b'], and got 1"),
        (TWO, [np.ones((1, 2)), np.ones((1, 2))], TypeError, "expected int32"),
        (TWO, [np.ones((1, 2)), np.array([[2**40]])], TypeError, "expected int32"),
        (
            TWO,
            [np.ones((1, 2)), np.ones((2, 2), int)],
            ValueError,
            "Inputs have batches of {'a': 1, 'b': 2}",
        ),
    ],
    ids=["shape", "no-batch", "text", "ragged", "name", "one", "float", "wide", "size"],
)
def test_inputs_that_do_not_fit_are_told(signature, x, error, text):
    with pytest.raises(error, match=re.escape(text)):
        echo(signature).predict(x)


# The first integer that float32 has not, a user's number, and the largest ones.
ROUNDED = {2**24 + 1: "int32", 123456789: "uint32", 2**63 - 1: "int64"}


@pytest.mark.parametrize("number, dtype", [*ROUNDED.items(), (2**64 - 1, "uint64")])
def test_an_integer_that_the_input_would_round_is_refused(number, dtype):
    with pytest.raises(TypeError, match="integers that float32 rounds") as caught:
        echo(ONE).predict(np.array([[3, number]], dtype))
    assert ".astype('float32')" in str(caught.value)


@pytest.mark.parametrize("x", [[[2**24, -7]], [[True, False]], [[2**40, 0.1]]])
def test_numbers_that_float32_holds_need_no_cast(x):
    found = echo(ONE).predict(np.array(x))
    np.testing.assert_array_equal(found, np.array(x).astype("float32"))
