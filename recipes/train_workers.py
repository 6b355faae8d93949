"""Trains on one machine or on many; killed, it goes on where it was.

One script for every launcher: alone, TF_CONFIG, Slurm's srun, or Ray.
Data: scikit-learn's 1,797 digits (8x8), each worker its own part; no network needed.
Command: python recipes/train_workers.py
         srun --ntasks=4 python recipes/train_workers.py --directory=/shared/digits
         TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type":
             "worker", "index": 0}}' python recipes/train_workers.py   (on a; 1 on b)
         python recipes/train_workers.py --ray_workers=4 --directory=/shared/digits
Time: 15 s alone on 2 CPU cores. Killed with --directory=X and run again, it goes on.
Expect: test accuracy of 0.97, at least 0.95; with several workers each has the same.
"""

import json
import os

import keras
import numpy as np
from absl import app, flags

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("directory", None, "For checkpoints, if any; all workers see it.")
flags.DEFINE_integer("epochs", 20, "Passes over the data.")
flags.DEFINE_integer("batch_size", 64, "Images in a batch of all workers together.")
flags.DEFINE_integer("every_steps", 50, "Steps from one checkpoint to the next.")
flags.DEFINE_integer("ray_workers", 0, "Workers that Ray starts; 0 trains without Ray.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load(batch_size: int):
    """Returns training data, of which each worker has its part, and test arrays."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.rint(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype("uint8")
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train = tfamp.data.Pipeline.from_arrays(x, y)
    train = train.shard("auto").shuffle(seed=0).batch(batch_size, drop_remainder=True)
    return train.build(), (x_test, y_test)


def build_model() -> keras.Model:
    """Returns the compiled network. It takes uint8 images."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def train(strategy, callbacks, policy, epochs, batch_size, seed, smoke):
    """Trains on all workers; the first prints the test metrics as a line of JSON."""
    status = tfamp.enable(policy=policy)
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = build_model()
    data, test = load(batch_size)
    if smoke:
        data, epochs = data.take(2), 1
    model.fit(data, epochs=epochs, callbacks=callbacks, shuffle=False, verbose=2)
    metrics = model.evaluate(*test, batch_size=64, verbose=0, return_dict=True)
    resolver = strategy.cluster_resolver
    if resolver is None or resolver.task_id in (None, 0):
        found = {"policy": status.policy, **metrics}
        print(json.dumps({**found, "replicas": strategy.num_replicas_in_sync}))


def run(settings):
    """Trains in this process, with the other workers that its launcher describes."""
    # Ray sets it for Keras 2, and Keras 3 would fail.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    names = ("directory", "every_steps")
    kept = {name: settings[name] for name in names}
    callbacks = [tfamp.callbacks.Resume(**kept)] if kept["directory"] else []
    rest = {name: value for name, value in settings.items() if name not in names}
    # The first thing that TensorFlow does in this process.
    train(tfamp.distribute.strategy(), callbacks, **rest)


def main(argv: list[str]) -> None:
    """Trains with those who take part."""
    names = ("policy", "epochs", "batch_size", "every_steps", "seed", "smoke")
    settings = {name: getattr(FLAGS, name) for name in names}
    settings["directory"] = FLAGS.directory and os.path.abspath(FLAGS.directory)
    if FLAGS.ray_workers:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer

        TensorflowTrainer(
            run,
            train_loop_config=settings,
            scaling_config=ScalingConfig(num_workers=FLAGS.ray_workers),
            run_config=RunConfig(
                storage_path=settings["directory"],
                failure_config=FailureConfig(max_failures=3),
            ),
        ).fit()
    else:
        run(settings)


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
