"""Models in several styles, of layers from outside, and under stock policies."""

import contextlib

import keras

STYLES = ("sequential", "functional", "subclassed", "nested")


class Own(keras.layers.Layer):
    """A layer with a call from outside, of what it holds, if anything, and inputs."""

    def __init__(self, function, held=None, **options):
        super().__init__(**options)
        self.function = function
        self.held = held

    def call(self, x):
        return self.function(x) if self.held is None else self.function(self.held, x)


class Subclassed(keras.Model):
    """Calls its layers one after the other."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def assembled(parts, style, shape):
    """Returns a model of layers, written in a style, for examples of a shape."""
    if style == "subclassed":
        return Subclassed(parts)
    if style == "nested":
        inner = keras.Sequential([keras.Input(shape), *parts[:-1]], name="inner")
        return keras.Sequential([keras.Input(shape), inner, parts[-1]])
    if style == "functional":
        x = y = keras.Input(shape)
        for part in parts:
            y = part(y)
        return keras.Model(x, y)
    assert style == "sequential"
    return keras.Sequential([keras.Input(shape), *parts])


@contextlib.contextmanager
def stock_policy(policy):
    """Sets Keras's own policy inside the block, as a script without tfamp does."""
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")
