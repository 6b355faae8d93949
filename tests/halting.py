"""A training that ends in its midst."""

import keras


class Halt(keras.callbacks.Callback):
    """Ends the training after a step, as Ctrl-C does."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
