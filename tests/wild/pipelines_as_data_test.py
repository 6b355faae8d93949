"""A pipeline as data: handed to `fit` and tools as it is, cut by `take`, repeated."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.data import Pipeline

X = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")


def regression():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def pairs(batch_size=20):
    return Pipeline.from_arrays(X, Y).batch(batch_size)


def test_fit_evaluate_and_predict_take_a_pipeline_as_it_is():
    model, other = regression(), regression()
    seen = model.fit(pairs(), validation_data=pairs(30), epochs=3, verbose=0).history
    same = other.fit(
        pairs().build(), validation_data=pairs(30).build(), epochs=3, verbose=0
    ).history
    assert seen == same and seen["loss"][-1] < seen["loss"][0]
    loss = other.evaluate(X, Y, verbose=0)  # of batches of 32
    assert model.evaluate(pairs(), verbose=0) == pytest.approx(loss, rel=1e-6)
    inputs = Pipeline.from_arrays(X).batch(7)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), model.predict(X, verbose=0), rtol=1e-6
    )


def test_tools_take_a_pipeline_as_it_is():
    found = tfamp.data.bottleneck(regression(), pairs(), seconds=0.2)
    assert found.batch_size == 20
    assert tfamp.data.check(pairs(), compute_dtype="float32").rules
    assert [len(y) for _, y in pairs(25)] == [25, 25, 10], "iterating builds it"


COUNT = {
    "elements": (lambda p: p.take(7).batch(4), [[0, 1, 2, 3], [4, 5, 6]]),
    "batches": (lambda p: p.batch(4).take(2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "what a filter keeps": (
        lambda p: p.filter(lambda x: x % 2 == 0).take(3).batch(8),
        [[0, 2, 4]],
    ),
    "before a map": (lambda p: p.take(3).map(lambda x: -x).batch(8), [[0, -1, -2]]),
    "repeated": (lambda p: p.take(2).repeat(2).batch(3), [[0, 1, 0], [1]]),
    "of no end": (
        lambda p: p.take(2).repeat().batch(3).take(2),
        [[0, 1, 0], [1, 0, 1]],
    ),
}


@pytest.mark.quick("elements-arrays")
@pytest.mark.parametrize("source", ["arrays", "dataset"])
@pytest.mark.parametrize("make, expected", COUNT.values(), ids=COUNT)
def test_take_and_repeat_count_what_is_written_before_them(source, make, expected):
    numbers = np.arange(20)
    pipeline = Pipeline.from_arrays(numbers)
    if source == "dataset":
        pipeline = Pipeline.from_dataset(tf.data.Dataset.from_tensor_slices(numbers))
    made = make(pipeline)
    assert [batch.numpy().tolist() for batch in made] == expected
    assert "take" in made.describe()


@pytest.mark.quick("take")
@pytest.mark.parametrize(
    "make, told",
    [
        (lambda p: p.take(0), "`count` is 0; expected"),
        (lambda p: p.repeat(-1), "`count` is -1; expected"),
        (lambda p: p.repeat().balance().batch(2).build(), "got a dataset without end"),
    ],
    ids=["take", "repeat", "balance"],
)
def test_what_cannot_be_counted_is_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make(Pipeline.from_arrays(X, np.arange(60) % 2))
