"""Models with dropout, noise or a cell inside what half precision spoils."""

from typing import Any

import keras
from keras import layers, ops

from benchmarks.faults.making import short_case
from benchmarks.faults.own_layers import (
    SEQUENCE,
    WIDTH,
    Cell,
    Encoder,
    OwnAttention,
    Whole,
    around,
    dropped,
    of_model,
    of_normal,
)

SLIPS = ("cancellation", "resolution", "accumulation")
RANGE = ("overflow", "constant", "backward", "underflow")


def square(x: Any) -> Any:
    """Returns squares that pass 65504 on their way."""
    return ops.square(x * 1e3) * 1e-3 * 1e-3


def _shifted(x: Any) -> Any:
    return (x + 3000.0) - 3000.0


def length(x: Any) -> Any:
    """Returns vectors of length one, by squares that pass 65504."""
    h = x * 300.0
    return h / ops.sqrt(ops.sum(ops.square(h), axis=-1, keepdims=True) + 1.0)


def _soft(x: Any) -> Any:
    return ops.log(1.0 + ops.exp(15.0 * x)) / 15.0


def _tiny(x: Any) -> Any:
    return ops.square(x * 1e-5) * 1e4 * 1e4 * 1e2


def _fifth(x: Any) -> Any:
    return (x * 20.0) ** 5 / 3e3 / 1e3


def _values(scale: float) -> list[Any]:
    """MultiHeadAttention whose values are large inside, and small outside again."""
    attention = layers.MultiHeadAttention(
        2, 4, dropout=0.2, output_shape=WIDTH, name="attention"
    )
    inputs = keras.Input((6, WIDTH))
    model = keras.Model(inputs, attention(inputs, inputs), name="block")
    return [_Enlarged(model, attention, scale, name="enlarged")]


class _Enlarged(layers.Layer):
    """Calls an attention whose value kernel was enlarged."""

    def __init__(self, model: Any, attention: Any, scale: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block = model
        weights = attention.get_weights()
        names = [weight.path for weight in attention.weights]
        for i, name in enumerate(names):
            if "value/kernel" in name:
                weights[i] = weights[i] * scale
            if "attention_output/kernel" in name or "output/kernel" in name:
                weights[i] = weights[i] / scale
        attention.set_weights(weights)

    def call(self, inputs: Any) -> Any:
        return self.block(inputs)


CASES = (
    *(
        short_case(
            f"drop_{name}",
            "randomness",
            around(dropped("block", function, is_last=is_last), style=style),
            *guilty,
            reasons=reasons,
            style=style,
        )
        for name, function, is_last, style, guilty, reasons in (
            ("square", square, False, "sequential", [["block"]], RANGE),
            ("square_last", square, True, "subclassed", [["block"]], RANGE),
            ("shifted", _shifted, False, "functional", [["block"]] * 2, SLIPS),
            ("length", length, False, "functional", [["block"]], RANGE),
            ("soft", _soft, True, "nested", [["inner/block"]], RANGE),
            ("tiny", _tiny, False, "nested stage", [["stage/block"]], RANGE),
        )
    ),
    short_case(
        "drop_attention",
        "randomness",
        around(lambda: [OwnAttention(150.0, name="attend")], shape=SEQUENCE),
        ["attend"],
        reasons=RANGE,
    ),
    short_case(
        "attention_values",
        "randomness",
        around(lambda: _values(3e5), style="subclassed", shape=SEQUENCE),
        ["enlarged/block/attention"],
        reasons=RANGE,
        style="subclassed",
        depth=5,
    ),
    short_case(
        "encoder_square",
        "randomness",
        around(lambda: [Encoder(square, name="encoder")], shape=SEQUENCE),
        ["encoder"],
        reasons=RANGE,
        depth=7,
    ),
    short_case(
        "encoder_shifted",
        "randomness",
        around(
            lambda: [Encoder(_shifted, name="encoder")],
            style="functional",
            shape=SEQUENCE,
        ),
        ["encoder"],
        ["encoder"],
        reasons=SLIPS,
        style="functional",
        depth=7,
    ),
    *(
        short_case(
            f"whole_{name}",
            "randomness",
            of_model(lambda f=function: Whole(f, name="whole"), of_normal(WIDTH)),
            *guilty,
            reasons=reasons,
            style="subclassed",
        )
        for name, function, guilty, reasons in (
            ("square", square, [["whole"]], RANGE),
            ("shifted", _shifted, [["whole"]] * 2, SLIPS),
            ("fifth", _fifth, [["whole"]], RANGE),
        )
    ),
    short_case(
        "noise_huge",
        "randomness",
        around(
            lambda: [
                layers.GaussianNoise(0.1, name="noise"),
                layers.Rescaling(1e6, name="huge"),
                layers.Rescaling(1e-6, name="back"),
            ]
        ),
        ["huge", "back"],
        reasons=RANGE,
        depth=6,
    ),
    short_case(
        "noise_far",
        "randomness",
        around(
            lambda: [
                layers.Rescaling(1.0, offset=3000.0, name="far"),
                layers.GaussianNoise(0.1, name="noise"),
                layers.BatchNormalization(name="batch_norm"),
            ]
        ),
        ["far", "noise", "batch_norm"],
        ["far", "noise", "batch_norm"],
        reasons=SLIPS,
        depth=6,
    ),
    short_case(
        "recurrent_dropout_huge",
        "randomness",
        around(
            lambda: [
                layers.Rescaling(1e6, name="huge"),
                layers.GRU(
                    WIDTH,
                    recurrent_dropout=0.2,
                    kernel_initializer=keras.initializers.RandomNormal(0, 4e-7, seed=1),
                    return_sequences=True,
                    name="gru",
                ),
            ],
            shape=SEQUENCE,
        ),
        ["huge", "gru"],
        reasons=RANGE,
        depth=5,
    ),
    short_case(
        "recurrent_cell",
        "randomness",
        around(
            lambda: [
                layers.RNN(Cell(_fifth), return_sequences=True, name="rnn"),
                layers.Dropout(0.1, name="drop"),
            ],
            shape=SEQUENCE,
        ),
        ["rnn"],
        reasons=RANGE,
        depth=5,
    ),
)
