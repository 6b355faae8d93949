"""The families of `keras.applications`, of which three train in the suite."""

import keras
import numpy as np
from keras import applications

from tests.wild.programs.registry import Trained, program

# Family: (its smallest member, side of its smallest images).
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
# What the others predict is compared.
TRAINED = ("ConvNeXt", "VGG", "Xception")
UNSTEADY = "after two steps on four images float32's own goes from 0.5 to 8 by its seed"


def built(family):
    """Returns a member for three classes, and a batch of noise with its labels."""
    make, size = FAMILIES[family]
    random = np.random.RandomState(0)
    x = random.uniform(0, 255, (4, size, size, 3)).astype("float32")
    model = make(weights=None, input_shape=(size, size, 3), classes=3)
    return model, x, random.randint(0, 3, 4)


def register(family):
    """Registers the program that trains a member on a batch of noise."""

    def run():
        model, x, y = built(family)
        yield model
        model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        yield Trained(history.history["loss"], model, x[:1])

    run.__name__ = family
    unsteady = "" if family in TRAINED else UNSTEADY
    program("keras.applications", "Functional", unsteady=unsteady)(run)


for _family in FAMILIES:
    register(_family)
