"""One member, the smallest, of each family of `keras.applications`."""

import math

import keras
import numpy as np
from keras import applications

from tests.wild.programs.registry import Trained, program

# Family: (model, side of its smallest images).
FAMILIES = {
    "ConvNeXt": (applications.ConvNeXtTiny, 32),
    "DenseNet": (applications.DenseNet121, 32),
    "EfficientNet": (applications.EfficientNetB0, 32),
    "EfficientNetV2": (applications.EfficientNetV2B0, 32),
    "InceptionResNetV2": (applications.InceptionResNetV2, 75),
    "InceptionV3": (applications.InceptionV3, 75),
    "MobileNet": (applications.MobileNet, 32),
    "MobileNetV2": (applications.MobileNetV2, 32),
    "MobileNetV3": (applications.MobileNetV3Small, 32),
    "NASNet": (applications.NASNetMobile, 32),
    "ResNet": (applications.ResNet50, 32),
    "ResNetV2": (applications.ResNet50V2, 32),
    "VGG": (applications.VGG16, 32),
    "Xception": (applications.Xception, 71),
}
WHY = "two steps from random weights"
# They drop whole branches at random: from one seed to another float32's losses go from
# 1.8 to 8, so that a finite one is all that can be asked.
SCATTERED = ("EfficientNet", "EfficientNetV2")


def register(family, make, size):
    """Registers the program that trains a member on a batch of noise."""

    def run():
        random = np.random.RandomState(0)
        x = random.uniform(0, 255, (4, size, size, 3)).astype("float32")
        y = random.randint(0, 3, 4)
        model = make(weights=None, input_shape=(size, size, 3), classes=3)
        yield model
        model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        yield Trained(history.history["loss"], model, x[:1])

    run.__name__ = family
    tolerance = math.inf if family in SCATTERED else 0.5
    program("keras.applications", "Functional", tolerance=tolerance, why=WHY)(run)


for _family, (_make, _size) in FAMILIES.items():
    register(_family, _make, _size)
