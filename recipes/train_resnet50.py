"""Fine-tunes the ResNet50 of keras.applications on images: the head, then all of it.

Data: scikit-learn's 1,797 digits as color images of 32x32, with no network; or a TFDS
name such as tf_flowers; or a folder that holds train/CLASS/*.jpg and test/CLASS/*.jpg.
Command: python recipes/train_resnet50.py                       (from random weights)
         python recipes/train_resnet50.py --weights=imagenet --dataset=photos --size=224
         tfamp compare recipes.train_resnet50:build --policies=float32,auto
Time: 4 minutes for 3 epochs on 2 CPU cores; weights of ImageNet are 100 MB to download.
Expect: with random weights a test accuracy above 0.8 on the digits.
"""

import json
import os

import keras
import tensorflow as tf
from absl import app, flags

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("dataset", "digits", "digits, a TFDS name, or a folder.")
flags.DEFINE_string("weights", None, "None for random ones, imagenet, or a file.")
flags.DEFINE_integer("size", 32, "Height and width of images, 32 or more.")
flags.DEFINE_integer("epochs", 3, "Passes over the data with all weights.")
flags.DEFINE_integer("batch_size", 32, "Images in a batch.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load(dataset: str, size: int):
    """Returns pipelines of (image, label) for training and test; images are uint8."""
    Pipeline = tfamp.data.Pipeline
    if os.path.isdir(dataset) or dataset.startswith((".", "/", "~")):
        root = os.path.expanduser(dataset)
        folders = (os.path.join(root, part) for part in ("train", "test"))
        return [Pipeline.from_images(f).decode((size, size)) for f in folders]

    def resize(image, label):
        image = tf.image.grayscale_to_rgb(image) if image.shape[-1] == 1 else image
        return tf.cast(tf.image.resize(image, (size, size)), tf.uint8), label

    if dataset == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 8, 8, 1) * (255 / 16)).astype("uint8")
        parts = (images[:1440], labels[:1440]), (images[1440:], labels[1440:])
        return [Pipeline.from_arrays(*part).map(resize) for part in parts]
    # The last tenth, as some datasets have no test split.
    splits = ("train[:90%]", "train[90%:]")
    return [Pipeline.from_tfds(dataset, split).map(resize) for split in splits]


def compile_model(model: keras.Model, learning_rate: float) -> None:
    """Compiles, which also has a change of `trainable` take effect."""
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


def build(seed=0, dataset="digits", weights=None, size=32, batch_size=32):
    """Returns the compiled model, training and test data."""
    keras.utils.set_random_seed(seed)
    train, test = load(dataset, size)
    # Changes come behind the cache, new in each epoch, and leave sizes alone.
    train = train.cache("memory").augment(strength=0.3, ramp_epochs=2, seed=seed)
    train = train.shuffle(seed=seed).batch(batch_size, drop_remainder=True).prefetch()
    train, test = train.build(), test.batch(batch_size).prefetch().build()
    num_classes = 1 + max(int(labels.numpy().max()) for _, labels in test)
    base = keras.applications.ResNet50(
        include_top=False, weights=weights, input_shape=(size, size, 3), pooling="avg"
    )
    images = keras.Input((size, size, 3), dtype="uint8")
    x = keras.ops.cast(images, "float32")
    x = keras.applications.resnet50.preprocess_input(x)
    # BatchNormalization keeps the statistics of the photographs that it knows.
    x = base(x, training=False if weights else None)
    x = keras.layers.Dropout(0.2)(x)
    outputs = keras.layers.Dense(num_classes, activation="softmax", name="head")(x)
    model = keras.Model(images, outputs)
    compile_model(model, 1e-3)
    return model, train, test


def main(argv: list[str]) -> None:
    """Trains the head, then all; prints the test metrics as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    model, train, test = build(
        FLAGS.seed, FLAGS.dataset, FLAGS.weights, FLAGS.size, FLAGS.batch_size
    )
    epochs = 1 if FLAGS.smoke else FLAGS.epochs
    if FLAGS.smoke:
        train, test = train.take(2), test.take(1)
    if FLAGS.weights:
        base = model.get_layer("resnet50")
        base.trainable = False
        compile_model(model, 1e-3)
        model.fit(train, epochs=1, shuffle=False)
        base.trainable = True
        compile_model(model, 1e-5)
    model.fit(train, epochs=epochs, shuffle=False)
    metrics = model.evaluate(test, verbose=0, return_dict=True)
    print(json.dumps({"policy": status.policy, **metrics}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
