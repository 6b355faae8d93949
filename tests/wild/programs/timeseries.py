"""Series: classification, forecasts, reconstruction, states that are kept."""

import keras
import numpy as np
from keras import layers

from tests.wild.programs import data
from tests.wild.programs.registry import Trained, program


@program("timeseries", "Functional, encoder blocks by a function")
def timeseries_transformer():
    x, y = data.waves(n=64)

    def encoder(inputs):
        h = layers.MultiHeadAttention(key_dim=4, num_heads=2, dropout=0.1)(
            inputs, inputs
        )
        h = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(0.1)(h))
        res = h + inputs
        h = layers.Conv1D(filters=4, kernel_size=1, activation="relu")(res)
        h = layers.Conv1D(filters=inputs.shape[-1], kernel_size=1)(h)
        return layers.LayerNormalization(epsilon=1e-6)(h) + res

    inputs = keras.Input((16, 1))
    h = layers.Dense(4)(inputs)
    for _ in range(2):
        h = encoder(h)
    h = layers.GlobalAveragePooling1D(data_format="channels_last")(h)
    h = layers.Dense(8, activation="relu")(h)
    outputs = layers.Dense(2, activation="softmax")(h)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy")
    yield model
    history = model.fit(x, y, batch_size=16, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@program("timeseries", "tf.data of windows, LSTM, early stopping")
def weather_forecast():
    x, _ = data.waves(n=1, length=160)
    windows = keras.utils.timeseries_dataset_from_array(
        x[0, :-1], x[0, 8:], sequence_length=8, batch_size=32
    )
    inputs = keras.Input((8, 1))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(8)(inputs)))
    yield model
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=5)
    history = model.fit(windows, epochs=8, callbacks=[stop], verbose=0)
    yield Trained(history.history["loss"], model, x[:, :8])


@program("timeseries", "Sequential autoencoder of convolutions, validation split")
def anomaly_autoencoder():
    x, _ = data.waves(n=256)
    model = keras.Sequential(
        [
            layers.Input(shape=(16, 1)),
            layers.Conv1D(8, 3, padding="same", strides=2, activation="relu"),
            layers.Dropout(rate=0.05),
            layers.Conv1D(4, 3, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(4, 3, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(8, 3, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(1, 3, padding="same"),
        ]
    )
    yield model
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
    history = model.fit(x, x, 16, 25, validation_split=0.1, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])


@program("timeseries", "stateful LSTM, states reset after each epoch")
def stateful_lstm():
    x = np.sin(np.arange(4 * 6 * 8) / 3).reshape(4, 6, 8, 1).astype("float32")
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(4, 8, 1)),
            layers.LSTM(8, stateful=True, return_sequences=True),
            layers.Dense(1),
        ]
    )
    yield model
    model.compile(keras.optimizers.Adam(0.02), loss="mse")
    parts = np.moveaxis(x, 1, 0).reshape(24, 8, 1)
    losses = []
    for _ in range(8):
        history = model.fit(
            parts[:, :-1], parts[:, 1:], batch_size=4, shuffle=False, verbose=0
        )
        losses += history.history["loss"]
        model.layers[0].reset_state()
    yield Trained(losses, model, parts[:4, :-1])


@program("timeseries", "Functional with ConvLSTM2D over frames")
def next_frame():
    random = np.random.RandomState(0)
    x = np.cumsum(random.normal(0, 0.1, (8, 5, 6, 6, 1)), axis=1).astype("float32")
    inputs = keras.Input((None, 6, 6, 1))
    h = layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(inputs)
    h = layers.BatchNormalization()(h)
    outputs = layers.Conv3D(1, 3, padding="same")(h)
    model = keras.Model(inputs, outputs)
    yield model
    model.compile(keras.optimizers.Adam(0.01), loss="mse")
    history = model.fit(x[:, :-1], x[:, 1:], batch_size=4, epochs=4, verbose=0)
    yield Trained(history.history["loss"], model, x[:2, :-1])


@keras.saving.register_keras_serializable("wild")
class ForecastCell(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.state_size = units

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[-1], self.units), initializer="uniform", name="kernel"
        )
        self.recurrent_kernel = self.add_weight(
            shape=(self.units, self.units), initializer="uniform", name="recurrent"
        )

    def call(self, inputs, states):
        previous = states[0]
        h = keras.ops.matmul(inputs, self.kernel)
        output = h + keras.ops.matmul(previous, self.recurrent_kernel)
        return keras.ops.tanh(output), [keras.ops.tanh(output)]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@program("timeseries", "RNN of an own cell")
def own_cell():
    x, y = data.waves(n=64)
    inputs = keras.Input((16, 1))
    h = layers.RNN([ForecastCell(8), ForecastCell(8)])(inputs)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(h))
    yield model
    model.compile(keras.optimizers.RMSprop(0.01), "binary_crossentropy")
    history = model.fit(x, y[:, None], batch_size=16, epochs=8, verbose=0)
    yield Trained(history.history["loss"], model, x[:4])
