"""Bytes, seconds, rates and ratios as text that fits in a table or a sentence."""

import math
import re

_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SECONDS_PER_MINUTE = 60
# GB is the maker's unit of a disk or a GPU's name, GiB what memory is counted in.
_FACTORS = {
    "": 1,
    **{f"{letter}b": 1000**n for n, letter in enumerate(("", *"kmgt"))},
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", start=1)},
}


def _three_digits(value: float) -> str:
    """Returns `value` with one decimal below 100, none above."""
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes in the largest binary unit that it fills."""
    value, unit = float(num_bytes), _BYTE_UNITS[0]
    for larger in _BYTE_UNITS[1:]:
        # 1023.95 KiB would be printed as 1,024 KiB, so it is 1.0 MiB already.
        if abs(value) < (1024 if unit == "bytes" else 1023.5):
            break
        value, unit = value / 1024, larger
    if unit == "bytes":
        return f"{value:.0f} byte" if abs(value) == 1 else f"{value:.0f} bytes"
    return f"{_three_digits(value)} {unit}"


def parse_bytes(argument: str, text: str) -> int:
    """Returns the bytes that a text such as "16GB" or "1.5 GiB" stands for."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip().lower())
    factor = _FACTORS.get(found[2]) if found else None
    number = 0 if found is None or factor is None else int(float(found[1]) * factor)
    if number < 1:
        raise ValueError(
            f"`{argument}` is {text!r}; expected a number of bytes, or one with a unit "
            "from kB to TB or from KiB to TiB. Write for example 16GB or 14.5GiB."
        )
    return number


def format_seconds(seconds: float) -> str:
    """Returns a duration: ns to s with three digits, then minutes, then hours."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if round(seconds) >= _SECONDS_PER_MINUTE:
        minutes, rest = divmod(round(seconds), _SECONDS_PER_MINUTE)
        if minutes < 60:
            return f"{minutes} min {rest:02d} s"
        return f"{minutes // 60} h {minutes % 60:02d} min"
    for size, unit in _SECOND_UNITS:
        # As above: 999.96 us is printed as 1.0 ms.
        if seconds >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds:.1e} s"


def format_rate(per_second: float, what: str = "examples") -> str:
    """Returns a rate, as in "4,971 examples/s"."""
    return f"{_three_digits(per_second)} {what}/s"


def format_share(fraction: float) -> str:
    """Returns a fraction of a whole in percent, as in "12.5 %"."""
    if 0 < fraction < 0.0005:
        return "< 0.1 %"
    return f"{100 * fraction:.1f} %"


def number(value: int | float) -> str:
    """Returns a number with at most four digits that matter; integers as they are."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def join_words(words: list[str] | tuple[str, ...], last: str = "and") -> str:
    """Returns words as a list in a sentence: "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
