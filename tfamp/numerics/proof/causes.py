"""Why a step is not faster: what was found, by the share of a step it concerns."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfamp.machine import devices as hardware
from tfamp.machine.speeds import Device
from tfamp.numerics.proof.result import (
    MAX_NAMED,
    Cast,
    Cause,
    Product,
    Unaligned,
    describe_unaligned,
)
from tfamp.records.formats import HALF
from tfamp.records.units import format_bytes, format_share, join_words

# Smaller shares explain nothing.
_MIN_SHARE = 0.005


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """What the causes are found in; costs are by the roofline.

    A product is small where moving its numbers costs more than multiplying them.
    `other_cost` is of what is neither product nor cast, `outer_cost` of that what no
    layer made, above all the optimizer. `possible_gain` is what a perfect input would
    save, None unmeasured; the other fields are as in `Proof`.
    """

    products: Sequence[Product]
    costs: Sequence[float]
    is_small: Sequence[bool]
    casts: Sequence[Cast]
    unaligned: Sequence[Unaligned]
    reasons: dict[str, str]
    devices: Sequence[Device]
    total_cost: float
    cast_cost: float
    other_cost: float
    outer_cost: float
    moved_bytes: int
    tf32: bool
    in_xla: bool
    batch_size: int
    possible_gain: float | None = None
    input_advice: str = ""

    def share(self, chosen: Callable[[Product], bool]) -> float:
        """Returns the part of the step that products of a kind take."""
        pairs = zip(self.products, self.costs, strict=True)
        cost = sum(cost for product, cost in pairs if chosen(product))
        return cost / self.total_cost if self.total_cost else 0.0

    def named(self, chosen: Callable[[Product], bool]) -> str:
        """Returns the layers with most FLOPs in products of a kind, as words."""
        flops: dict[str, int] = {}
        for product in self.products:
            if chosen(product):
                flops[product.layer] = flops.get(product.layer, 0) + product.step_flops
        return name_layers(sorted(flops, key=lambda layer: -flops[layer]))


def name_layers(layers: Sequence[str]) -> str:
    """Returns the first of some layers in words, and how many more there are.

    Example:
        >>> name_layers(["a", "b", "c", "d", "e", ""])
        "'a', 'b', 'c', 'd' and 2 more"
    """
    words = [repr(layer) if layer else "no layer" for layer in layers[:MAX_NAMED]]
    if len(layers) > MAX_NAMED:
        words.append(f"{len(layers) - MAX_NAMED} more")
    return join_words(words)


def find_causes(step: TracedStep) -> tuple[Cause, ...]:
    """Returns why a step is not faster, the largest share first."""
    found = [cause for rule in _RULES for cause in rule(step)]
    found = [each for each in found if each.figure >= _MIN_SHARE]
    return tuple(sorted(found, key=lambda cause: -cause.figure))


def _is_half(product: Product) -> bool:
    return product.runs_in in HALF


def _is_float32(product: Product) -> bool:
    return product.dtype == "float32" and product.runs_in == "float32"


def _input(step: TracedStep) -> Iterator[Cause]:
    if step.possible_gain is not None:
        yield Cause(
            "input",
            step.possible_gain,
            f"The input takes {format_share(step.possible_gain)} of a step, which no "
            "dtype shortens (measured).",
            step.input_advice,
        )


def _float32(step: TracedStep) -> Iterator[Cause]:
    in_float32 = [product for product in step.products if _is_float32(product)]
    if not in_float32:
        return
    figure = step.share(_is_float32)
    flops = sum(p.step_flops for p in in_float32)
    share = flops / (sum(p.step_flops for p in step.products) or 1)
    if len(in_float32) == len(step.products):
        best = hardware.recommend(step.devices)
        yield Cause(
            "float32",
            figure,
            "Every matrix product and convolution runs in float32: "
            f"{_why(step, in_float32)}.",
            f"Leave it: {best.reason}"
            if best.policy == "float32"
            else f"Call `tfamp.apply(model, {best.policy!r})`, or `tfamp.enable` "
            f"before the model is built: {best.reason}",
        )
        return
    yield Cause(
        "float32",
        figure,
        f"{format_share(share)} of the FLOPs run in float32: {_why(step, in_float32)}.",
        "If they may lose precision, name other layers in `keep_float32` of "
        "`tfamp.enable` or `tfamp.apply`, and compare the accuracy.",
    )


def _why(step: TracedStep, products: Iterable[Product]) -> str:
    """Returns the layers by the reason for their dtype."""
    by_reason: dict[str, list[str]] = {}
    for product in products:
        layers = by_reason.setdefault(step.reasons.get(product.layer, ""), [])
        if product.layer not in layers:
            layers.append(product.layer)
    return "; ".join(
        f"{name_layers(layers)} ({reason})" if reason else name_layers(layers)
        for reason, layers in by_reason.items()
    )


def _casts(step: TracedStep) -> Iterator[Cause]:
    if not step.casts or not step.total_cost:
        return
    kinds: dict[str, int] = {}
    for cast in step.casts:
        kinds[cast.what] = kinds.get(cast.what, 0) + cast.moved_bytes
    total = sum(kinds.values())
    parts = [
        f"{format_bytes(size)} of {what}"
        for what, size in sorted(kinds.items(), key=lambda item: -item[1])
    ]
    most = name_layers(list(dict.fromkeys(cast.layer for cast in step.casts)))
    fused = " XLA fuses most of them with their neighbours." if step.in_xla else ""
    yield Cause(
        "casts",
        step.cast_cost / step.total_cost,
        f"{sum(cast.count for cast in step.casts):,} casts move {format_bytes(total)} "
        f"a step, {format_share(total / (step.moved_bytes or 1))} of all bytes: "
        f"{join_words(parts)}; most in {most}.{fused}",
        "Give layers between two layers of half precision that dtype too, so that "
        "activations stay in it. Casts of weights cost less with a larger batch.",
    )


def _memory(step: TracedStep) -> Iterator[Cause]:
    if not step.total_cost:
        return
    on_cpu = all(device.kind == "cpu" for device in step.devices)
    if step.in_xla:
        remedy = "XLA has fused them already; wider layers shift the balance."
    elif on_cpu and any(_is_half(product) for product in step.products):
        remedy = (
            "Wider layers shift the balance. XLA would fuse them, but computes half "
            "precision in float32 on CPUs: time it before you turn it on."
        )
    else:
        remedy = (
            "Try `model.compile(..., jit_compile=True)`, which fuses them, and time it."
        )
    yield Cause(
        "memory",
        step.other_cost / step.total_cost,
        "Element-wise layers, normalization, reductions and the optimizer move "
        f"{format_bytes(step.other_cost)} of {format_bytes(step.moved_bytes)} a step "
        f"if nothing is fused ({format_bytes(step.outer_cost)} by optimizer, loss and "
        "metrics); matrix units do not speed those up.",
        remedy,
    )


def _small(step: TracedStep) -> Iterator[Cause]:
    pairs = zip(step.products, step.is_small, strict=True)
    small = {id(product) for product, is_small in pairs if is_small}

    def is_small_half(product: Product) -> bool:
        return _is_half(product) and id(product) in small

    number = sum(map(is_small_half, step.products))
    yield Cause(
        "small products",
        step.share(is_small_half),
        f"{number} of {len(step.products)} products are too small for the units of "
        "half precision: moving their numbers takes longer than multiplying them "
        f"({step.named(is_small_half)}).",
        f"Raise the batch size from {step.batch_size:,}, or make these layers wider.",
    )


def _shapes(step: TracedStep) -> Iterator[Cause]:
    if not any(d.kind == "gpu" and hardware.fast_dtypes(d) for d in step.devices):
        return
    layers = {each.layer for each in step.unaligned}
    yield Cause(
        "shapes",
        step.share(lambda p: _is_half(p) and p.layer in layers),
        "Sizes that are not multiples of 8 keep tensor cores from full speed: "
        f"{describe_unaligned(step.unaligned)}.",
        "Pad them to what stands behind the arrow: units, channels, vocabulary, batch.",
    )


def _device(step: TracedStep) -> Iterator[Cause]:
    for dtype in HALF:
        objection = hardware.objection(f"mixed_{dtype}", step.devices)
        figure = step.share(lambda p, dtype=dtype: p.runs_in == dtype)  # type: ignore[misc]
        if objection and figure:
            message, _, remedy = objection.rpartition("; ")
            yield Cause(
                "device", figure, f"{message}.", remedy[:1].upper() + remedy[1:]
            )


def _tf32(step: TracedStep) -> Iterator[Cause]:
    if step.tf32:
        yield Cause(
            "TF32",
            step.share(lambda p: p.runs_in in (*HALF, "float32")),
            "TF32 is on: products in float32 run on tensor cores already, at half the "
            "rate of float16 and bfloat16, so half precision makes them at most twice "
            "as fast.",
            "Compare with it off, by "
            "`tf.config.experimental.enable_tensor_float_32_execution(False)`, to see "
            "what half precision gains over true float32.",
        )


def _compiler(step: TracedStep) -> Iterator[Cause]:
    def is_widened(product: Product) -> bool:
        return product.dtype in HALF and product.runs_in not in HALF

    widened = [product for product in step.products if is_widened(product)]
    if widened:
        yield Cause(
            "compiler",
            step.share(is_widened),
            f"XLA computes {len(widened)} of {len(step.products)} products in float32 "
            f"that the graph has in {widened[0].dtype}: it converts their factors "
            f"first ({step.named(is_widened)}).",
            "Leave XLA off here: `model.compile(..., jit_compile=False)`. Its float32 "
            "gains nothing from half precision.",
        )


_RULES: tuple[Callable[[TracedStep], Iterator[Cause]], ...] = (
    _input,
    _float32,
    _casts,
    _memory,
    _small,
    _shapes,
    _device,
    _tf32,
    _compiler,
)
