"""Keras's own tests and examples of the class, with tfamp's in its place."""

import unittest

import keras
import pytest
from keras.src import testing

import tfamp
from tests.styles import stock_policy

# Keras's class has no static scale; that ours has one is the point. Nor does it add up
# gradients itself: it sends its user to the inner optimizer, which counts bad ones too.
REFUSED_BY_KERAS = {
    "test_init_dynamic_arg",
    "test_init_base_optimizer_unsupported_args_gradient_accumulation_steps",
}


def test_kerass_own_tests_pass(monkeypatch):
    theirs = pytest.importorskip("keras.src.optimizers.loss_scale_optimizer_test")
    monkeypatch.setattr(theirs, "LossScaleOptimizer", tfamp.LossScaleOptimizer)
    cases = [c for c in vars(theirs).values() if isinstance(c, type)]
    (case,) = [c for c in cases if issubclass(c, testing.TestCase)]
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TestResult()
    suite.run(result)
    failed = {test._testMethodName for test, _ in [*result.failures, *result.errors]}
    assert failed <= REFUSED_BY_KERAS, result.failures + result.errors
    assert result.testsRun - len(failed) - len(result.skipped) >= 8


def test_it_is_one_of_kerass():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.25))
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with stock_policy("mixed_float16"):
        model.compile(optimizer, "mse")
    assert model.optimizer is optimizer  # Keras wraps no second time


def test_keras_takes_name_as_the_fourth_argument():
    inner = keras.optimizers.SGD(0.25)
    optimizer = tfamp.LossScaleOptimizer(inner, 8.0, 5, "mine")
    assert optimizer.name == "mine"
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (8.0, 5)


def test_unknown_and_misplaced_arguments_are_refused_as_by_keras():
    inner = keras.optimizers.SGD(0.25)
    with pytest.raises((TypeError, ValueError), match="foo"):
        tfamp.LossScaleOptimizer(inner, foo=True)
