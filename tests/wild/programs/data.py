"""Synthetic data that small models learn from in a few epochs.

One label in five is wrong and numbers are noisy, so that a loss comes to rest above 0.
"""

import numpy as np


def noisy(labels, classes, random):
    """Returns labels, one in five of them drawn anew."""
    others = random.randint(0, classes, len(labels))
    return np.where(random.uniform(size=len(labels)) < 0.2, others, labels)


def images(n=64, size=8, channels=1, classes=4):
    """Returns images with a bright stripe each, and the stripe's place as label."""
    random = np.random.RandomState(0)
    labels = random.randint(0, classes, n)
    x = random.uniform(0, 0.3, (n, size, size, channels)).astype("float32")
    width = size // classes
    for image, label in zip(x, labels, strict=True):
        image[:, label * width : (label + 1) * width] += 0.7
    return x, noisy(labels, classes, random)


def sentences(n=64, length=8, words=20, classes=2):
    """Returns word ids whose first word tells the label, zeros at the end."""
    random = np.random.RandomState(0)
    ids = random.randint(classes + 1, words, (n, length)).astype("int32")
    labels = random.randint(0, classes, n)
    ids[:, 0] = labels + 1
    for row, stop in zip(ids, random.randint(length // 2, length + 1, n), strict=True):
        row[stop:] = 0
    return ids, noisy(labels, classes, random)


def waves(n=64, length=16, classes=2):
    """Returns noisy sines whose frequency tells the label, with one channel."""
    random = np.random.RandomState(0)
    labels = random.randint(0, classes, n)
    steps = np.arange(length)[None, :]
    x = np.sin(2 * np.pi * (labels[:, None] + 1) * steps / length)
    x = x + random.normal(0, 0.1, x.shape)
    return x[..., None].astype("float32"), noisy(labels, classes, random)


def rows(n=64, columns=6):
    """Returns columns of numbers, and a target that depends on them, with noise."""
    random = np.random.RandomState(0)
    x = random.normal(size=(n, columns)).astype("float32")
    y = np.tanh(x @ random.normal(size=(columns, 1))) + random.normal(0, 0.4, (n, 1))
    return x, y.astype("float32")


def clusters(n=64, columns=8, classes=4):
    """Returns points around centers, and which center."""
    random = np.random.RandomState(0)
    centers = random.normal(0, 2, (classes, columns))
    labels = random.randint(0, classes, n)
    x = centers[labels] + random.normal(0, 0.5, (n, columns))
    return x.astype("float32"), noisy(labels, classes, random)
