"""What a layer's own `call` finds of Keras is what it finds without tfamp."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfamp
from tfamp.keras_hooks import structure


class Penalized(layers.Layer):
    """Weighs its activity by the factor that its regularizer was given."""

    def call(self, x):
        factor = self.activity_regularizer.l2
        assert self.activity_regularizer.get_config() == {"l2": 0.5}
        self.add_loss(factor * tf.reduce_sum(x * x))
        return x


def test_a_regularizer_has_its_attributes_inside_a_call():
    with tfamp.scope("mixed_bfloat16"):
        layer = Penalized(activity_regularizer=keras.regularizers.L2(0.5))
    layer(np.full((1, 2), 2.0, "float32"))
    # Half of the two squares of 2, by the layer and by its regularizer.
    assert [float(loss) for loss in layer.losses] == [4.0, 4.0]


def test_a_ragged_symbolic_output_stays_ragged():
    class Same(layers.Layer):
        def call(self, x):
            return x

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, dtype=self.compute_dtype, ragged=True)

    with tfamp.scope("mixed_bfloat16", keep_float32=[Same]):
        output = Same()(keras.Input((None,), ragged=True))
    assert (output.dtype, output.ragged) == ("bfloat16", True)


def test_a_layer_that_lies_where_another_one_did_is_another(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
    monkeypatch.setattr(structure, "id", lambda layer: 0, raising=False)
    before = structure.graph_key(model)
    assert structure.graph_key(model) == before
    model.pop()
    model.add(layers.Dense(2))
    assert structure.graph_key(model) != before
