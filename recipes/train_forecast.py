"""Trains an LSTM to forecast several measured series at once.

Data: 800 moments of an electroencephalogram with four electrodes, which comes with
matplotlib; or a CSV file with a head line and a column of numbers for each series. The
last quarter is for validation.
Command: python recipes/train_forecast.py
         python recipes/train_forecast.py --dataset=power.csv --window=96
         tfamp compare recipes.train_forecast:build --epochs=20 --tolerance=0.02
Time: 10 s on 2 CPU cores in float32.
Expect: a mean absolute error of 0.38 to 0.395, below that of "it stays as it is",
which is printed beside it: 0.407.
"""

import json

import keras
import numpy as np
from absl import app, flags

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("dataset", "eeg", "eeg, or a CSV file.")
flags.DEFINE_integer("window", 8, "Moments that the network looks at.")
flags.DEFINE_integer("epochs", 20, "Passes over the data.")
flags.DEFINE_integer("batch_size", 32, "Windows in a batch.")
flags.DEFINE_float("learning_rate", 3e-3, "Of Adam.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load(dataset: str) -> np.ndarray:
    """Returns the series, `(moments, series)`, float32."""
    if dataset == "eeg":
        from matplotlib.cbook import get_sample_data

        with get_sample_data("eeg.dat") as file:
            return np.frombuffer(file.read(), float).reshape(800, 4).astype("float32")
    return np.genfromtxt(dataset, delimiter=",", skip_header=1, dtype="float32")


def cut_windows(series: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows and the moment that follows each.

    Example:
        >>> x, y = cut_windows(np.arange(5.0)[:, None], window=3)
        >>> x[..., 0].tolist(), y[:, 0].tolist()
        ([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]], [3.0, 4.0])
    """
    if len(series) <= window:
        raise ValueError(
            f"A part of the series has {len(series)} moments; expected more than "
            f"`--window`, {window}. Pass a smaller one."
        )
    x = np.lib.stride_tricks.sliding_window_view(series, window, axis=0)
    return np.ascontiguousarray(x[:-1].swapaxes(1, 2)), series[window:]


def build(seed=0, dataset="eeg", window=8, batch_size=32, learning_rate=3e-3):
    """Returns the compiled model, training and validation data."""
    keras.utils.set_random_seed(seed)
    series = load(dataset)
    cut = len(series) * 3 // 4
    # Statistics of the training part alone: the future is not known.
    series = (series - series[:cut].mean(axis=0)) / series[:cut].std(axis=0)
    pipelines = (
        tfamp.data.Pipeline.from_arrays(*cut_windows(part, window))
        for part in (series[:cut], series[cut:])
    )
    train, validation = pipelines
    inputs = keras.Input((window, series.shape[1]))
    x = keras.layers.Dropout(0.3)(keras.layers.LSTM(16)(inputs))
    # What changes since the last moment is easier to learn than where it stands; at
    # first nothing does.
    change = keras.layers.Dense(series.shape[1], kernel_initializer="zeros")(x)
    model = keras.Model(inputs, keras.layers.Add()([change, inputs[:, -1]]))
    model.compile(keras.optimizers.Adam(learning_rate), "mse", metrics=["mae"])
    train = train.shuffle(seed=seed).batch(batch_size, drop_remainder=True)
    return model, train.prefetch().build(), validation.batch(batch_size).build()


def main(argv: list[str]) -> None:
    """Trains, and prints the validation metrics as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    model, train, validation = build(
        FLAGS.seed, FLAGS.dataset, FLAGS.window, FLAGS.batch_size, FLAGS.learning_rate
    )
    if FLAGS.smoke:
        train = train.take(2)
    epochs = 1 if FLAGS.smoke else FLAGS.epochs
    model.fit(train, epochs=epochs, shuffle=False, verbose=2)
    metrics = model.evaluate(validation, verbose=0, return_dict=True)
    unchanged = [np.abs(x[:, -1] - y).mean() for x, y in validation.as_numpy_iterator()]
    metrics["mae_if_it_stays"] = float(np.mean(unchanged))
    print(json.dumps({"policy": status.policy, **metrics}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
