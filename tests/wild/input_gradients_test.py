"""Gradients of inputs outside of training: saliency maps, adversaries, dreams."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import in_each_way

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
PIXELS = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
HALF = 0.02  # relative error of a few roundings of float16


def classifier(policy, sureness=6.0):
    """Returns a classifier that is so sure that gradients of its answer are tiny."""
    with tfamp.scope(policy):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(4, 3, activation="tanh"),
                layers.Flatten(),
                layers.Dense(3, activation="softmax"),
            ]
        )
    kernel, bias = model.layers[-1].get_weights()
    model.layers[-1].set_weights([kernel, bias + np.float32([2.5 * sureness, 0, 0])])
    return model


def saliency(model, images, **tape_options):
    with tf.GradientTape(**tape_options) as tape:
        tape.watch(images)
        score = tf.reduce_max(model(images), axis=-1)
    return tape.gradient(score, images)


def saliency_by_name(model, images):
    """The gradient of one class, of images that come in a list beside others."""
    with tf.GradientTape() as tape:
        tape.watch([images, tf.constant(0.0)])
        score = model(images, training=False)[:, 0]
    return tape.gradient(score, [images])[0]


WAYS = {
    "saliency": saliency,
    "of one class": saliency_by_name,
}


@pytest.mark.quick("saliency-eager")
@in_each_way
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_map_of_a_sure_classifier_is_that_of_float32(way, decorate):
    images = tf.constant(PIXELS)
    exact = decorate(lambda x: way(classifier_32, x))
    classifier_32 = classifier("float32")
    expected = exact(images).numpy()
    model = classifier("mixed_float16")
    found = decorate(lambda x: way(model, x))(images).numpy()
    assert 0 < np.abs(expected).max() < 1e-5
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < HALF, error


@pytest.mark.quick("eager")
@in_each_way
def test_a_gradient_that_needs_no_scale_and_stands_none_is_finite(decorate):
    def steep(model, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = 3e4 * tf.reduce_sum(model(x)[:, 0])
        return tape.gradient(score, x)

    images = tf.constant(PIXELS)
    model = classifier("mixed_float16", sureness=0.0)
    found = decorate(lambda x: steep(model, x))(images).numpy()
    expected = steep(classifier("float32", sureness=0.0), images).numpy()
    assert np.linalg.norm(found - expected) < HALF * np.linalg.norm(expected)


def of_inputs(model, tape, images, scores, losses):
    return [tape.jacobian(scores, images)]


def of_each_input(model, tape, images, scores, losses):
    return [tape.batch_jacobian(scores, images)]


def of_weights(model, tape, images, scores, losses):
    return tape.jacobian(losses, model.trainable_variables)


@pytest.mark.parametrize(
    "decorate", [lambda step: step, tf.function], ids=["eager", "graph"]
)
@pytest.mark.parametrize("ask", [of_inputs, of_each_input, of_weights])
def test_a_jacobian_is_as_in_float32(ask, decorate):
    found = {}
    for policy in ("float32", "mixed_float16"):
        model = classifier(policy, sureness=0.0)
        optimizer = keras.optimizers.SGD()  # which may come to apply what a tape gives

        @decorate
        def jacobians(images, model=model):
            with tf.GradientTape() as tape:
                if ask is not of_weights:
                    tape.watch(images)
                scores = model(images)
                losses = tf.reduce_sum(tf.square(scores), axis=-1)
            return ask(model, tape, images, scores, losses)

        found[policy] = jacobians(tf.constant(PIXELS[:2]))
        del optimizer
    for exact, half in zip(*found.values(), strict=True):
        off = np.linalg.norm(tf.cast(half, tf.float32) - exact)
        assert off < HALF * np.linalg.norm(exact)
