"""Measures two workers and the bytes on `lo`; writes verdict, share, share by bytes.

`python -m tests.scaling_program OUT [wire]`: "wire" for a small model whose step is
gradients of 100 Mbit/s, else one that computes long.
"""

import statistics
import sys
from pathlib import Path

import keras
import numpy as np

import tfamp
from tfamp.comparison.replicas.processes import Replicas

BITS_A_SECOND = 1e8


def build_wire():
    """Returns a model of 1.2 MB of weights and little work."""
    return _built(512, 1, 16)


def build_work():
    """Returns a model of as many weights, used again and again."""
    return _built(256, 24, 1024)


def _built(units, times, examples):
    x = keras.Input((64,))
    dense = keras.layers.Dense(units, "relu")
    h = keras.layers.Dense(units, "relu")(x)
    for _ in range(times):
        h = dense(h)
    model = keras.Model(x, keras.layers.Dense(4)(h))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    rng = np.random.default_rng(0)
    x = rng.random((2 * examples, 64), dtype="float32")
    return model, (x, x[:, :4])


def sent():
    """Returns the bytes that have gone through `lo`."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("there is no interface `lo`")


def main(out, is_wire):
    """Measures, and writes what came of it."""
    shares = []

    class Counted(Replicas):
        def ask(self, do, **arguments):
            before = sent()
            answers = super().ask(do, **arguments)
            if do == "time" and arguments["step"] == "weak":
                a_step = (sent() - before) / arguments["number"]
                seconds = max(each["seconds"] for each in answers)
                shares.append(8 * a_step / BITS_A_SECOND / seconds)
            return answers

    from tfamp.comparison.replicas import measurement

    measurement.Replicas = Counted
    found = tfamp.scaling(
        build_wire if is_wire else build_work,
        workers=True,
        policy="float32",
        batch_size=16 if is_wire else 1024,
        seconds=8,
    )
    print(found)
    by_bytes = statistics.median(shares)
    text = f"{found.verdict}\n{found.communication_share}\n{by_bytes}\n"
    Path(out).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], "wire" in sys.argv)
