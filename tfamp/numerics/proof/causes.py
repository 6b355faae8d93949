"""Why a step is not faster: what was found, by the share of a step it concerns."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfamp.machine import devices as hardware
from tfamp.numerics.proof.result import (
    MAX_NAMED,
    Cause,
    Product,
    Proof,
    describe_unaligned,
)
from tfamp.records.formats import HALF
from tfamp.records.units import format_bytes, format_share, join_words

# Smaller shares explain nothing.
_MIN_SHARE = 0.005


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """What the causes are found in: a proof that has none yet, and costs.

    Costs are by the roofline. A product is small where moving its numbers costs more
    than multiplying them. `other_cost` is of what is neither product nor cast,
    `outer_cost` of that what no layer made, above all the optimizer.
    """

    proof: Proof
    costs: Sequence[float]
    is_small: Sequence[bool]
    cast_cost: float
    other_cost: float
    outer_cost: float
    input_advice: str = ""

    @property
    def total_cost(self) -> float:
        """The cost of all operations."""
        return sum(self.costs) + self.cast_cost + self.other_cost

    def share(self, chosen: Callable[[Product], bool]) -> float:
        """Returns the part of the step that products of a kind take."""
        pairs = zip(self.proof.operations, self.costs, strict=True)
        cost = sum(cost for product, cost in pairs if chosen(product))
        return cost / self.total_cost if self.total_cost else 0.0

    def named(self, chosen: Callable[[Product], bool]) -> str:
        """Returns the layers with most FLOPs in products of a kind, as words."""
        flops: collections.Counter[str] = collections.Counter()
        for product in filter(chosen, self.proof.operations):
            flops[product.layer] += product.step_flops
        return name_layers([layer for layer, _ in flops.most_common()])


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
    gain = step.proof.possible_gain
    if gain is not None:
        yield Cause(
            "input",
            gain,
            f"The input takes {format_share(gain)} of a step, which no dtype shortens "
            "(measured).",
            step.input_advice,
        )


def _float32(step: TracedStep) -> Iterator[Cause]:
    products = step.proof.operations
    in_float32 = [product for product in products if _is_float32(product)]
    if not in_float32:
        return
    why = _why(step.proof, in_float32)
    if len(in_float32) == len(products):
        best = hardware.recommend(step.proof.devices)
        message = f"Every matrix product and convolution runs in float32: {why}."
        remedy = (
            f"Leave it: {best.reason}"
            if best.policy == "float32"
            else f"Call `tfamp.apply(model, {best.policy!r})`, or `tfamp.enable` "
            f"before the model is built: {best.reason}"
        )
    else:
        share = sum(p.step_flops for p in in_float32) / (step.proof.flops or 1)
        message = f"{format_share(share)} of the FLOPs run in float32: {why}."
        remedy = (
            "If they may lose precision, name other layers in `keep_float32` of "
            "`tfamp.enable` or `tfamp.apply`, and compare the accuracy."
        )
    yield Cause("float32", step.share(_is_float32), message, remedy)


def _why(proof: Proof, products: Iterable[Product]) -> str:
    """Returns the layers by the reason for their dtype."""
    by_reason: dict[str, dict[str, None]] = {}
    for product in products:
        reason = proof.reasons.get(product.layer, "")
        by_reason.setdefault(reason, {})[product.layer] = None
    return "; ".join(
        name_layers(list(layers)) + (f" ({reason})" if reason else "")
        for reason, layers in by_reason.items()
    )


def _casts(step: TracedStep) -> Iterator[Cause]:
    casts = step.proof.casts
    if not casts or not step.total_cost:
        return
    kinds: collections.Counter[str] = collections.Counter()
    for cast in casts:
        kinds[cast.what] += cast.moved_bytes
    total = kinds.total()
    parts = [f"{format_bytes(size)} of {what}" for what, size in kinds.most_common()]
    most = name_layers(list(dict.fromkeys(cast.layer for cast in casts)))
    fused = ""
    if step.proof.source == "XLA":
        fused = " XLA fuses most of them with their neighbours."
    yield Cause(
        "casts",
        step.cast_cost / step.total_cost,
        f"{sum(cast.count for cast in casts):,} casts move {format_bytes(total)} a "
        f"step, {format_share(total / (step.proof.moved_bytes or 1))} of all bytes: "
        f"{join_words(parts)}; most in {most}.{fused}",
        "Give layers between two layers of half precision that dtype too, so that "
        "activations stay in it. Casts of weights cost less with a larger batch.",
    )


def _memory(step: TracedStep) -> Iterator[Cause]:
    if not step.total_cost:
        return
    on_cpu = all(device.kind == "cpu" for device in step.proof.devices)
    if step.proof.source == "XLA":
        remedy = "XLA has fused them already; wider layers shift the balance."
    elif on_cpu and any(_is_half(product) for product in step.proof.operations):
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
        f"{format_bytes(step.other_cost)} of {format_bytes(step.proof.moved_bytes)} a "
        f"step if nothing is fused ({format_bytes(step.outer_cost)} by optimizer, loss "
        "and metrics); matrix units do not speed those up.",
        remedy,
    )


def _small(step: TracedStep) -> Iterator[Cause]:
    products = step.proof.operations
    pairs = zip(products, step.is_small, strict=True)
    small = {id(product) for product, is_small in pairs if is_small}

    def is_small_half(product: Product) -> bool:
        return _is_half(product) and id(product) in small

    number = sum(map(is_small_half, products))
    yield Cause(
        "small products",
        step.share(is_small_half),
        f"{number} of {len(products)} products are too small for the units of half "
        "precision: moving their numbers takes longer than multiplying them "
        f"({step.named(is_small_half)}).",
        f"Raise the batch size from {step.proof.batch_size:,}, or make these layers "
        "wider.",
    )


def _shapes(step: TracedStep) -> Iterator[Cause]:
    if not any(d.kind == "gpu" and hardware.fast_dtypes(d) for d in step.proof.devices):
        return
    layers = {each.layer for each in step.proof.unaligned}
    yield Cause(
        "shapes",
        step.share(lambda p: _is_half(p) and p.layer in layers),
        "Sizes that are not multiples of 8 keep tensor cores from full speed: "
        f"{describe_unaligned(step.proof.unaligned)}.",
        "Pad them to what stands behind the arrow: units, channels, vocabulary, batch.",
    )


def _device(step: TracedStep) -> Iterator[Cause]:
    for dtype in HALF:
        objection = hardware.objection(f"mixed_{dtype}", step.proof.devices)
        figure = step.share(lambda p, dtype=dtype: p.runs_in == dtype)  # type: ignore[misc]
        if objection and figure:
            message, _, remedy = objection.rpartition("; ")
            yield Cause(
                "device", figure, f"{message}.", remedy[:1].upper() + remedy[1:]
            )


def _tf32(step: TracedStep) -> Iterator[Cause]:
    if step.proof.tf32:
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

    products = step.proof.operations
    widened = [product for product in products if is_widened(product)]
    if widened:
        yield Cause(
            "compiler",
            step.share(is_widened),
            f"XLA computes {len(widened)} of {len(products)} products in float32 that "
            f"the graph has in {widened[0].dtype}: it converts their factors first "
            f"({step.named(is_widened)}).",
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
