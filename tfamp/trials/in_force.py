"""Puts what is compared in force: a policy of tfamp's or of stock Keras."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

import tfamp
from tfamp.machine import amx
from tfamp.trials.variant import Variant

_REWRITE = "auto_mixed_precision_onednn_bfloat16"


@contextlib.contextmanager
def in_force(variant: Variant) -> Iterator[tuple[str, str]]:
    """Puts a variant in force, and afterwards what was in force before.

    Yields:
        The policy it came to, and why.

    Example:
        >>> with in_force(Variant.parse("keras:mixed_bfloat16")) as (policy, why):
        ...     print(policy, keras.layers.Dense(4).compute_dtype, why, sep=", ")
        mixed_bfloat16, bfloat16, stock Keras
    """
    if variant.rewrite or variant.is_stock:
        # `tfamp.enable` does so for the policies that need it.
        amx.avoid()
    with contextlib.ExitStack() as stack:
        if variant.rewrite:
            tf.config.optimizer.set_experimental_options({_REWRITE: True})
            stack.callback(
                tf.config.optimizer.set_experimental_options, {_REWRITE: False}
            )
        if variant.is_stock:
            before = keras.config.dtype_policy()
            stack.callback(keras.config.set_dtype_policy, before)
            keras.config.set_dtype_policy(variant.policy)
            yield variant.policy, "stock Keras"
        else:
            kept = "default" if variant.has_rules else "none"
            status = stack.enter_context(tfamp.scope(variant.policy, keep_float32=kept))
            yield status.policy, status.why
