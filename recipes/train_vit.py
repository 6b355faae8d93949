"""Trains a vision transformer of KerasHub to classify images.

Needs KerasHub: pip install keras-hub
Data: scikit-learn's 1,797 digits, a fifth for test, with no network; or a TFDS name; or
a folder that holds train/CLASS/*.jpg and test/CLASS/*.jpg.
Command: python recipes/train_vit.py
         python recipes/train_vit.py --dataset=cifar10 --size=32
         tfamp compare recipes.train_vit:build --epochs=20 --policies=float32,auto
Time: 1 minute on 2 CPU cores in float32.
Expect: test accuracy of 0.95, at least 0.9, from random weights. With a network,
ViTBackbone.from_preset("vit_base_patch16_224_imagenet") begins with trained ones.
"""

import json
import os

import keras
import tensorflow as tf
from absl import app, flags

import tfamp

try:
    import keras_hub
except ImportError as error:
    raise ImportError("It needs KerasHub. Run `pip install keras-hub`.") from error

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("dataset", "digits", "digits, a TFDS name, or a folder.")
flags.DEFINE_integer("size", 16, "Height and width of images, a multiple of 4.")
flags.DEFINE_integer("epochs", 20, "Passes over the data.")
flags.DEFINE_integer("batch_size", 64, "Images in a batch.")
flags.DEFINE_float("learning_rate", 1e-3, "Of AdamW.")
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
    splits = ("train[:90%]", "train[90%:]")
    return [Pipeline.from_tfds(dataset, split).map(resize) for split in splits]


def build(seed=0, dataset="digits", size=16, batch_size=64, learning_rate=1e-3):
    """Returns the compiled model, training and test data."""
    keras.utils.set_random_seed(seed)
    train, test = load(dataset, size)
    train = train.cache("memory").shuffle(seed=seed)
    train = train.batch(batch_size, drop_remainder=True).prefetch().build()
    test = test.batch(batch_size).prefetch().build()
    num_classes = 1 + max(int(labels.numpy().max()) for _, labels in test)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(size, size, 3),
        patch_size=4,
        num_layers=4,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
    )
    images = keras.Input((size, size, 3), dtype="uint8")
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    classifier = keras_hub.models.ViTImageClassifier(backbone, num_classes, None)
    model = keras.Model(images, classifier(x))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate, weight_decay=1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model, train, test


def main(argv: list[str]) -> None:
    """Trains, and prints the test metrics as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    model, train, test = build(
        FLAGS.seed, FLAGS.dataset, FLAGS.size, FLAGS.batch_size, FLAGS.learning_rate
    )
    if FLAGS.smoke:
        train, test = train.take(2), test.take(2)
    model.fit(train, epochs=1 if FLAGS.smoke else FLAGS.epochs, shuffle=False)
    metrics = model.evaluate(test, verbose=0, return_dict=True)
    print(json.dumps({"policy": status.policy, **metrics}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
