"""The signature of exported models, and how inputs are checked against it."""

import re
from pathlib import Path

import numpy as np
import pytest

from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec

FLOATS, INTS = (None, 2), (None, None)
ONE = Signature(
    (TensorSpec("x", FLOATS, "float32"),), (TensorSpec("y", FLOATS, "float32"),)
)
TWO = Signature(
    (TensorSpec("a", FLOATS, "float32"), TensorSpec("b", INTS, "int32")),
    (TensorSpec("u", FLOATS, "float32"), TensorSpec("v", INTS, "int32")),
)


class Echo(LoadedModel):
    """Gives its inputs back, under the names of its outputs."""

    def run(self, inputs):
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, inputs.values(), strict=True))


def echo(signature, x):
    return Echo("onnx", Path("."), signature, None).predict(x)


def test_inputs_come_by_order_or_by_name():
    a, b = np.ones((3, 2), np.float64), np.arange(6).reshape(3, 2)
    for answer in (echo(TWO, (a, b)), echo(TWO, {"b": b, "a": a})):
        assert list(answer) == ["u", "v"]
        assert answer["u"].dtype == np.float32 and answer["v"].dtype == np.int32
        np.testing.assert_array_equal(answer["v"], b)


ONES = np.ones((1, 2))
WRONG = {
    "shape": (ONE, np.ones((2, 3)), "is of shape (2, 3); expected (None, 2)"),
    "no batch": (ONE, np.ones(2), "`x[np.newaxis]`"),
    "text": (ONE, np.array([["a", "b"]]), "expected float32"),
    "ragged": (ONE, [[1, 2], [3]], "Pass rows of one length"),
    "name": (ONE, {"z": ONES}, "Add ['x']. Leave out ['z']."),
    "one": (TWO, ONES, "takes 2 inputs, ['a', 'b'], not 1"),
    "float": (TWO, [ONES, ONES], "expected int32"),
    "wide": (TWO, [ONES, np.array([[2**40]])], "expected int32"),
    "size": (TWO, [ONES, np.ones((2, 2), int)], "have batches of {'a': 1, 'b': 2}"),
}


@pytest.mark.parametrize("signature, x, text", WRONG.values(), ids=WRONG)
def test_inputs_that_do_not_fit_are_told(signature, x, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        echo(signature, x)


# The first integer that float32 has not, a user's number, and the largest one.
@pytest.mark.parametrize("number", [2**24 + 1, 123456789, 2**64 - 1])
def test_an_integer_that_the_input_would_round_is_refused(number):
    with pytest.raises(TypeError, match="integers that float32 rounds") as caught:
        echo(ONE, np.array([[3, number]], "uint64"))
    assert ".astype('float32')" in str(caught.value)


@pytest.mark.parametrize("x", [[[2**24, -7]], [[True, False]], [[2**40, 0.1]]])
def test_numbers_that_float32_holds_need_no_cast(x):
    found = echo(ONE, np.array(x))
    np.testing.assert_array_equal(found, np.array(x).astype("float32"))
