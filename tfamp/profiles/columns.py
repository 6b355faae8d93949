"""Rows as lines of text in columns."""

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    r"""Returns rows as lines, the first column to the left, the others to the right.

    Args:
        rows: Cells, as many in each row; the first row is the heading.

    Example:
        >>> print(in_columns([("type", "time"), ("MatMul", "1.0 ms")]))
        type      time
        MatMul  1.0 ms
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
