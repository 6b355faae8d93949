"""`tfamp.quantize_aware`: a model trains with the int8 values of its export."""

from typing import Any

import keras
from absl import logging

from tfamp.dtypes import resolution
from tfamp.dtypes.rules import KeepFloat32, parse
from tfamp.keras_hooks import fake_quantization, structure, trainer
from tfamp.models import apply
from tfamp.records import checks
from tfamp.serving.exports import int8_layers
from tfamp.stepping.arguments import check_built

_NEW = [[0.0, 0.0, 0.0]] * 2  # of two inputs, of which no batch was seen


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
    inputs are rounded to 256 steps of a range that follows the batches of training:
    calls with `training=True`, or under a tape where nobody says.
    Weights are stored and updated as before, gradients pass the rounding, and dtypes
    stay: it works under any policy, in `fit` and in own loops. Fine-tune a trained
    model so for some epochs at a tenth of its learning rate, compiled anew, then
    `tfamp.export(model, path, format="onnx", dtype="int8", calibration=x)`, which takes
    over the ranges and rounds nothing else. To LiteRT it is "dynamic" if nobody says:
    "static" there rounds the outputs of products, too, which costs more.

    Args:
        model: A built Keras model. It is changed in place, and stays compiled.
        weights: "int8".
        activations: "int8", or None for an export that finds ranges as it answers.
        keep: Layers to leave as they are, as in `keep_float32`; a small head is left in
            any case. An int8 export leaves them, too.

    Returns:
        `model`. What a file or a clone of it needs is told under Notes.

    Raises:
        TypeError: `model` is not a Keras model, or `keep` is not what selects layers.
        ValueError: It is not built, holds none of these layers, one of them is
            quantized already, or an entry of `keep` matches none.

    Notes:
        `tfamp.load_model` gives the model back as it was. Stock Keras loads the file
        without the rounding, as a clone is without it: call `quantize_aware` again.
        Where the x86 processor that exports has no VNNI, ONNX and OpenVINO get weights
        of 7 bits, coarser than those of training: sums of 8 would be cut off.

    Source: B. Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, 2018.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> quantize_aware(model) is model
        True
        >>> model.compile("sgd", "mse")
        >>> x = keras.ops.ones((8, 4))
        >>> history = model.fit(x, x[:, :2], verbose=0)
    """
    checks.choice("weights", weights, ("int8",))
    if activations is not None:
        checks.choice("activations", activations, ("int8",))
    check_built(model, "train for integers")
    chosen = _chosen(model, keep)
    ranges = [] if activations is None else _NEW
    fake_quantization.attach_all(model, dict.fromkeys(chosen, ranges))
    if resolution.settings_of(model) is None:  # else its file would not tell
        apply(model, model.dtype_policy.name, keep_float32="none")
    trainer.drop_traced_functions(model)
    logging.info(
        "tfamp.quantize_aware: %d layers of %r train with int8 weights%s.",
        len(chosen),
        model.name,
        "" if activations is None else " and inputs",
    )
    return model


def _chosen(model: keras.Model, keep: Any) -> list[str]:
    """Returns the paths of the layers to round; others are as they were."""
    entries = [keep] if isinstance(keep, str) or callable(keep) else [*keep]
    rules, _ = parse(["none", *entries])
    unused, chosen, heads = set(rules), [], int8_layers.layers_kept(model, ())
    has_products = False
    for path, layer, _ in structure.walk(model):
        if not fake_quantization.kernels_of(layer):
            continue
        matching = {rule for rule in rules if rule.matches(layer, path=path)}
        unused -= matching
        has_products = True
        if matching or path in heads:
            fake_quantization.detach(layer)
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
        chosen.append(path)
    if unused:
        told = sorted(rule.name.partition(": ")[2] for rule in unused)
        raise ValueError(
            f"`keep` has {', '.join(told)}, which matches no layer of {model.name!r} "
            "that would be rounded. Leave it out, or name a layer as in "
            "`tfamp.assignment(model)`."
        )
    if not has_products:
        raise ValueError(
            f"Model {model.name!r} has no Dense, EinsumDense, convolution or recurrent "
            "cell to round; expected one. Export it as it is."
        )
    return chosen
