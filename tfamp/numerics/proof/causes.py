"""Why a step is not faster, by the share of its FLOPs or bytes that it concerns."""

import collections
from collections.abc import Iterator, Sequence

from tfamp.graph.bodies import Operation
from tfamp.graph.products import padded, unaligned_sizes
from tfamp.machine import devices as hardware
from tfamp.numerics.proof.result import Cause, Product, Proof
from tfamp.records.formats import HALF
from tfamp.records.units import format_bytes, format_share, join_words

# Smaller shares explain nothing.
_MIN_SHARE = 0.005
# In a sentence; more are counted.
_MAX_NAMED = 4


def name_layers(layers: Sequence[str]) -> str:
    """Returns the first of some layers in words, and how many more there are.

    Example:
        >>> name_layers(["a", "b", "c", "d", "e", ""])
        "'a', 'b', 'c', 'd' and 2 more"
    """
    words = [repr(layer) if layer else "no layer" for layer in layers[:_MAX_NAMED]]
    if len(layers) > _MAX_NAMED:
        words.append(f"{len(layers) - _MAX_NAMED} more")
    return join_words(words)


def find_causes(
    proof: Proof,
    pairs: Sequence[tuple[Operation, Product]],
    reasons: dict[str, str],
) -> tuple[Cause, ...]:
    """Returns why a step is not faster, the largest share first.

    `pairs` are the products of the proof with their operations, `reasons` say why a
    layer is in float32, by its path.
    """
    found = [
        *_float32(proof, reasons),
        *_casts(proof),
        *_shapes(proof, pairs),
        *_device(proof),
        *_tf32(proof),
    ]
    kept = [each for each in found if each.figure >= _MIN_SHARE]
    return tuple(sorted(kept, key=lambda cause: -cause.figure))


def _float32(proof: Proof, reasons: dict[str, str]) -> Iterator[Cause]:
    share = proof.share_of_flops("float32")
    by_reason: dict[str, dict[str, None]] = {}
    for product in proof.operations:
        if product.dtype == "float32":
            reason = reasons.get(product.layer, "")
            by_reason.setdefault(reason, {})[product.layer] = None
    why = "; ".join(
        name_layers(list(layers)) + (f" ({reason})" if reason else "")
        for reason, layers in by_reason.items()
    )
    if share == 1.0:
        best = hardware.recommend(proof.devices)
        message = f"Every matrix product and convolution runs in float32: {why}."
        remedy = (
            f"Leave it: {best.reason}"
            if best.policy == "float32"
            else f"Call `tfamp.apply(model, {best.policy!r})`, or `tfamp.enable` "
            f"before the model is built: {best.reason}"
        )
    else:
        message = f"{format_share(share)} of the FLOPs run in float32: {why}."
        remedy = (
            "If they may lose precision, name other layers in `keep_float32` of "
            "`tfamp.enable` or `tfamp.apply`, and compare the accuracy."
        )
    yield Cause("float32", share, message, remedy)


def _casts(proof: Proof) -> Iterator[Cause]:
    kinds: collections.Counter[str] = collections.Counter()
    for cast in proof.casts:
        kinds[cast.what] += cast.moved_bytes
    share = kinds.total() / proof.moved_bytes if proof.moved_bytes else 0.0
    parts = [f"{format_bytes(size)} of {what}" for what, size in kinds.most_common()]
    yield Cause(
        "casts",
        share,
        f"{sum(cast.count for cast in proof.casts):,} casts move "
        f"{format_bytes(kinds.total())} a step, {format_share(share)} of all bytes if "
        f"nothing is fused: {join_words(parts) if parts else 'none'}; most in "
        f"{name_layers(list(dict.fromkeys(cast.layer for cast in proof.casts)))}.",
        "Give layers between two layers of half precision that dtype too, so that "
        "activations stay in it. Casts of weights cost less with a larger batch.",
    )


def _shapes(
    proof: Proof, pairs: Sequence[tuple[Operation, Product]]
) -> Iterator[Cause]:
    if not any(d.kind == "gpu" and hardware.fast_dtypes(d) for d in proof.devices):
        return
    sizes: dict[str, dict[str, int]] = {}
    for operation, product in pairs:
        if product.dtype in HALF and product.direction == "forward":
            if odd := unaligned_sizes(operation):
                sizes.setdefault(product.layer, {}).update(odd)
    flops = sum(p.step_flops for p in proof.operations if p.layer in sizes)
    parts = [
        f"{layer!r} "
        + join_words([f"{name} {size} -> {padded(size)}" for name, size in odd.items()])
        for layer, odd in list(sizes.items())[:_MAX_NAMED]
    ]
    if len(sizes) > _MAX_NAMED:
        parts.append(f"{len(sizes) - _MAX_NAMED} layers more")
    yield Cause(
        "shapes",
        flops / proof.flops if proof.flops else 0.0,
        "Sizes that are not multiples of 8 keep tensor cores from full speed: "
        f"{'; '.join(parts)}.",
        "Pad them to what stands behind the arrow: units, channels, vocabulary, batch.",
    )


def _device(proof: Proof) -> Iterator[Cause]:
    for dtype in HALF:
        objection = hardware.objection(f"mixed_{dtype}", proof.devices)
        if objection:
            message, _, remedy = objection.rpartition("; ")
            yield Cause(
                "device",
                proof.share_of_flops(dtype),
                f"{message}.",
                remedy[:1].upper() + remedy[1:],
            )


def _tf32(proof: Proof) -> Iterator[Cause]:
    if proof.tf32:
        yield Cause(
            "TF32",
            sum(map(proof.share_of_flops, (*HALF, "float32"))),
            "TF32 is on: products in float32 run on tensor cores already, at half the "
            "rate of float16 and bfloat16, so half precision makes them at most twice "
            "as fast.",
            "Compare with it off, by "
            "`tf.config.experimental.enable_tensor_float_32_execution(False)`, to see "
            "what half precision gains over true float32.",
        )
