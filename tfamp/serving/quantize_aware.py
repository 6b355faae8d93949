"""`tfamp.quantize_aware`: a model trains with the int8 values of its export."""

from collections.abc import Mapping
from typing import Any

import keras
from absl import logging

from tfamp.dtypes.settings import KeepFloat32, parse
from tfamp.keras_hooks import fake_quantization, structure, trainer
from tfamp.records import checks
from tfamp.stepping.arguments import check_built

_OWN = keras.layers
_CELLS = (_OWN.SimpleRNNCell, _OWN.GRUCell, _OWN.LSTMCell)
_DEPTHWISE = (_OWN.DepthwiseConv1D, _OWN.DepthwiseConv2D)
_SEPARABLE = (_OWN.SeparableConv1D, _OWN.SeparableConv2D)
_TRANSPOSED = (_OWN.Conv1DTranspose, _OWN.Conv2DTranspose, _OWN.Conv3DTranspose)
_PLAIN = (_OWN.Dense, _OWN.Conv1D, _OWN.Conv2D, _OWN.Conv3D)


def quantize_aware(
    model: keras.Model,
    *,
    weights: str = "int8",
    activations: str | None = "int8",
    keep: KeepFloat32 = (),
) -> keras.Model:
    """Has a built, even trained model train with the rounding of an int8 export.

    In Dense, EinsumDense (which attention is made of), convolutions and recurrent cells
    the kernels read as the int8 values that an export holds, one scale a channel, and
    inputs are rounded to 256 steps of a range that follows the batches of training.
    Weights are stored and updated as before, gradients pass the rounding, and dtypes
    stay: it works under any policy, in `fit` and in own loops. Fine-tune a trained
    model so for some epochs at a tenth of its learning rate, then
    `tfamp.export(model, path, dtype="int8")`, which takes over the ranges.

    Args:
        model: A built Keras model. It is changed in place, and stays compiled.
        weights: "int8".
        activations: "int8", or None for an export that finds ranges as it answers.
        keep: Layers to leave as they are, as in `keep_float32`. They are to be named in
            the export's `keep_float32`, too.

    Returns:
        `model`. What a file or a clone of it needs is told under Notes.

    Raises:
        TypeError: `model` is not a Keras model, or `keep` is not what selects layers.
        ValueError: It is not built, holds none of these layers, one of them is
            quantized already, or an entry of `keep` matches none.

    Notes:
        `tfamp.load_model` gives the model back as it was. Stock Keras loads the file
        without the rounding, as a clone is without it: call `quantize_aware` again.

    Source: B. Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, 2018.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> tfamp.quantize_aware(model) is model
        True
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 4), "float32")
        >>> history = model.fit(x, x[:, :2], verbose=0)
    """
    checks.choice("weights", weights, ("int8",))
    if activations is not None:
        checks.choice("activations", activations, ("int8",))
    check_built(model, "train for integers")
    chosen = _chosen(model, keep)
    with model.distribute_strategy.scope():
        for layer, kernels in chosen:
            fake_quantization.attach(
                layer,
                kernels,
                has_range=activations is not None,
                num_inputs=2 if isinstance(layer, _CELLS) else 1,
            )
    for _, layer, _ in structure.walk(model):
        if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
            layer.use_cudnn = False  # whose kernels would pass the cell by
    trainer.drop_traced_functions(model)
    logging.info(
        "tfamp.quantize_aware: %d layers of %r train with int8 weights%s.",
        len(chosen),
        model.name,
        "" if activations is None else " and inputs",
    )
    return model


def kernels_of(layer: keras.layers.Layer) -> Mapping[str, tuple[int, ...]]:
    """Returns the axes of the channels of each kernel, by the attribute that holds it.

    Example:
        >>> layer = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 4))
        >>> kernels_of(layer)
        {'_kernel': (1, 2)}
        >>> kernels_of(keras.layers.Flatten())
        {}
    """
    if isinstance(layer, keras.layers.EinsumDense):
        _, kernel, output = layer.equation.replace("->", ",").split(",")
        axes = [i for i, letter in enumerate(kernel) if letter in output]
        return {"_kernel": tuple(axes)}
    if isinstance(layer, _CELLS):
        return {"kernel": (-1,), "recurrent_kernel": (-1,)}
    if isinstance(layer, _DEPTHWISE):
        return {"kernel": (-2, -1)}
    if isinstance(layer, _SEPARABLE):
        return {"depthwise_kernel": (-2, -1), "pointwise_kernel": (-1,)}
    if isinstance(layer, _TRANSPOSED):
        return {"_kernel" if "_kernel" in vars(layer) else "kernel": (-2,)}
    return {"_kernel": (-1,)} if isinstance(layer, _PLAIN) else {}


def _chosen(model: keras.Model, keep: Any) -> list[tuple[Any, Any]]:
    """Returns the layers to change, with their kernels."""
    entries = [keep] if isinstance(keep, str) or callable(keep) else [*keep]
    rules = parse(["none", *entries]).of_user
    unused, chosen, kept = set(rules), [], 0
    for path, layer, _ in structure.walk(model):
        kernels = kernels_of(layer)
        if not kernels:
            continue
        matching = {rule for rule in rules if rule.matches(layer, path=path)}
        unused -= matching
        if matching:
            fake_quantization.detach(layer)
            kept += 1
            continue
        if layer.dtype_policy.quantization_mode is not None:
            raise ValueError(
                f"Layer {path!r} is quantized already ({layer.dtype_policy.name}); "
                "expected one that trains. Build the model anew, and don't call its "
                "`quantize`."
            )
        if getattr(layer, "lora_enabled", False):
            raise ValueError(
                f"Layer {path!r} adds a LoRA product to its kernel, which no int8 "
                "kernel holds; expected a plain one. Merge it by saving and loading "
                f"the model, or pass `keep=[{layer.name!r}]`."
            )
        chosen.append((layer, kernels))
    if unused:
        told = sorted(rule.name.partition(": ")[2] for rule in unused)
        raise ValueError(
            f"`keep` has {', '.join(told)}, which matches no layer of {model.name!r} "
            "that would be rounded. Leave it out, or name a layer as in "
            "`tfamp.assignment(model)`."
        )
    if not (chosen or kept):
        raise ValueError(
            f"Model {model.name!r} has no Dense, EinsumDense, convolution or recurrent "
            "cell to round; expected one. Export it as it is."
        )
    return chosen
