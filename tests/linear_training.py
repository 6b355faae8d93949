"""A linear regression whose training can be told apart to 1e-6, step by step."""

import keras
import numpy as np

rng = np.random.default_rng(0)
X = rng.normal(size=(48, 4)).astype("float32")
Y = X.sum(-1, keepdims=True)
KERNEL = np.array([[0.5], [-1.0], [0.25], [2.0]], "float32")
BIAS = np.array([0.5], "float32")
# Sums of at most 20 rows in another order; a loss adds up 6 of them.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def linear():
    """Returns a model that begins with the weights above."""
    x = keras.Input((4,))
    model = keras.Model(x, keras.layers.Dense(1)(x))
    model.set_weights([KERNEL, BIAS])
    return model


def inner():
    """Returns an optimizer whose slots tell how many updates there were."""
    return keras.optimizers.SGD(0.125, momentum=0.5)


def spoiled(x, bad_rows, batch_size):
    """Returns a copy of `x` with an infinite feature in some rows.

    Args:
        x: Shape (rows, features).
        bad_rows: Number of a batch -> rows of it.
        batch_size: Rows in a batch.
    """
    x = x.copy()
    for batch, rows in bad_rows.items():
        for row in rows:
            x[batch * batch_size + row, 0] = np.inf
    return x


def without(bad_rows, batch_size):
    """Returns the data less every batch that has a bad row."""
    rows = np.arange(len(X))
    good = rows[~np.isin(rows // batch_size, list(bad_rows))]
    return X[good], Y[good]


def one_device(x, y, batch_size):
    """Returns a model trained by stock Keras, and its loss in the epoch."""
    model = linear()
    model.compile(inner(), "mse", jit_compile=False)
    fit = model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return model, fit.history["loss"]
