"""Prints a proof: a row for each layer, then casts, causes and notes."""

import textwrap
from typing import Any

from tfamp.numerics.proof.records import Product, describe_unaligned
from tfamp.records import console
from tfamp.records.units import format_bytes, format_share

_MAX_LAYERS = 40
_MAX_CASTS = 8
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
_SOURCES = {
    "graph": "the traced graph",
    "XLA": "XLA's compiled program",
    "rewrite": "the graph as TensorFlow rewrote it",
}


def render(proof: Any) -> str:
    """Returns a `Proof` as text of at most 110 columns."""
    lines = [*_head(proof), *_layers(proof)]
    if proof.casts:
        lines += _casts(proof)
    if proof.unaligned and "shapes" not in {cause.name for cause in proof.causes}:
        lines += _wrapped(
            "Not multiples of 8, which tensor cores of a GPU would want: "
            f"{describe_unaligned(proof.unaligned)}."
        )
    if proof.causes:
        lines.append(
            "Why it is not faster, by the share of a step (estimated, overlapping):"
        )
        for number, cause in enumerate(proof.causes, start=1):
            start = f"{number}. {cause.name}, {format_share(cause.figure)}: "
            lines += _wrapped(f"{start}{cause.message}", indent=3)
            lines += _wrapped(f"   Remedy: {cause.remedy}", indent=3)
    for note in proof.notes:
        lines += _wrapped(f"Note: {note}", indent=6)
    return "\n".join(line.rstrip() for line in lines)


def _head(proof: Any) -> list[str]:
    devices = ", ".join(dict.fromkeys(device.name for device in proof.devices))
    replicas = f" on {proof.num_replicas} replicas" if proof.num_replicas > 1 else ""
    lines = _wrapped(
        f"{proof.step.capitalize()} step of {proof.model!r}, {proof.batch_size:,} "
        f"examples{replicas}, {devices}{', TF32 on' if proof.tf32 else ''}."
    )
    dtypes = dict.fromkeys(product.runs_in for product in proof.operations)
    shares = [
        f"{format_share(proof.share_of_flops(dtype))} {dtype}"
        for dtype in sorted(dtypes, key=lambda dtype: -proof.share_of_flops(dtype))
    ]
    source = _SOURCES[proof.source]
    return lines + _wrapped(
        f"{_format_flops(proof.flops)} in matrix products and convolutions: "
        f"{', '.join(shares) or 'none'} (from {source})."
    )


def _layers(proof: Any) -> list[str]:
    groups: dict[str, list[Product]] = {}
    for product in proof.operations:
        groups.setdefault(product.layer, []).append(product)
    if not groups:
        return []
    rows = []
    for layer, products in list(groups.items())[:_MAX_LAYERS]:
        flops = sum(product.step_flops for product in products)
        rows.append(
            (
                layer or "(no layer)",
                _directed(products, "forward"),
                _directed(products, "backward"),
                _format_flops(flops).removesuffix("FLOPs"),
                format_share(flops / proof.flops if proof.flops else 0.0),
            )
        )
    if len(groups) > _MAX_LAYERS:
        rows.append((f"and {len(groups) - _MAX_LAYERS} layers more", "", "", "", ""))
    columns = {
        "layer": {**console.FOLD, "max_width": 36},
        "forward": {**console.FOLD, "max_width": 24},
        "backward": {**console.FOLD, "max_width": 24},
        "FLOPs": console.RIGHT,
        "share": console.RIGHT,
    }
    return console.text_of(console.table(columns, rows)).splitlines()


def _directed(products: list[Product], direction: str) -> str:
    """Returns how many products run in which dtype: "2x bfloat16"."""
    counts: dict[str, int] = {}
    for product in products:
        if product.direction == direction:
            said = product.dtype
            if product.final_dtype not in ("", product.dtype):
                said = f"{_SHORT.get(said, said)}, run in {product.final_dtype}"
            counts[said] = counts.get(said, 0) + product.count
    parts = [f"{n}x {name}" if n > 1 else name for name, n in counts.items()]
    return " + ".join(parts)


def _casts(proof: Any) -> list[str]:
    rows = [
        (
            cast.layer or "(no layer)",
            cast.what,
            f"{cast.source_dtype} -> {cast.target_dtype}",
            f"{cast.count:,}",
            format_bytes(cast.moved_bytes),
        )
        for cast in proof.casts[:_MAX_CASTS]
    ]
    rest = proof.casts[_MAX_CASTS:]
    if rest:
        number = sum(cast.count for cast in rest)
        moved = format_bytes(sum(cast.moved_bytes for cast in rest))
        rows.append((f"{len(rest)} kinds more", "", "", f"{number:,}", moved))
    wide = {**console.FOLD, "max_width": 36}
    columns = {
        **dict.fromkeys(("casts in", "of", "from -> to"), wide),
        **dict.fromkeys(("number", "bytes moved"), console.RIGHT),
    }
    return console.text_of(console.table(columns, rows)).splitlines()


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, console.WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _format_flops(flops: int) -> str:
    """Returns a number of FLOPs: "1.2 GFLOPs"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= size:
            return f"{flops / size:.1f} {prefix}FLOPs"
    return f"{flops} FLOPs"
