"""Threads that train, count and write while another one traces a step."""

import threading

import keras
import numpy as np
import tensorflow as tf

import tfamp

X, Y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")


def compiled_model():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    model.compile(optimizer, "mse", jit_compile=True)
    return model


def test_two_compiled_fits_at_once():
    assign = vars(type(tf.Variable(0.0)))["assign"]
    models = [compiled_model() for _ in range(2)]
    start, errors = threading.Barrier(2), []

    def train(model):
        try:
            start.wait()
            model.fit(X, Y, epochs=2, verbose=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert vars(type(tf.Variable(0.0)))["assign"] is assign
    for model in models:
        assert all(np.isfinite(w).all() for w in model.get_weights())


def test_a_counter_of_another_thread_goes_on_while_a_step_is_traced():
    counter, stop, errors, counted = tf.Variable(0.0), threading.Event(), [], [0]

    def count():
        while not stop.is_set():
            try:
                counter.assign_add(1.0)
                counted[0] += 1
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        compiled_model().fit(X, Y, verbose=0)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert counter.numpy() == counted[0] > 0
