"""Turns records of CSV files into columns, and finds the record that cannot be."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources._csv_format import (
    MAX_FLOAT32_INTEGER,
    Column,
    Format,
    is_number,
    split_fields,
)
from tfamp.data.sources._damage import PARSE_ERRORS, message_of


@dataclasses.dataclass(frozen=True)
class Parser:
    """Parses many records in one call.

    Attributes:
        format: What the columns are.
    """

    format: Format

    def __call__(self, records: tf.Tensor) -> Any:
        """Returns the selected columns of records `(n,)`; empty records do not count.

        One record that does not fit makes the call fail.
        """
        form = self.format
        records = tf.boolean_mask(records, tf.strings.length(records) > 0)
        others = self._other_na_values
        is_direct = len(others) <= 1
        parts = tf.io.decode_csv(
            records,
            [self._default(column, is_direct) for column in form.columns],
            field_delim=form.delimiter,
            na_value=others[0] if len(others) == 1 else "",
        )
        # An empty call would give vectors of unknown length.
        found = {
            column.name: self._converted(tf.ensure_shape(part, (None,)), column)
            for column, part in zip(form.columns, parts, strict=True)
            if column.name in form.selected
        }
        features = {name: found[name] for name in form.features}
        return features if form.label is None else (features, found[form.label])

    def find_bad(self, records: Sequence[bytes]) -> list[int]:
        """Returns the positions of the records that cannot be parsed.

        Those that look wrong to Python are tried one by one. What may be left is
        halved until single records are, in a dozen calls for each.
        """
        bad = {
            number
            for number, record in enumerate(records)
            if record and self._looks_bad(record) and self.why_bad([record]) is not None
        }
        ranges = [[number for number in range(len(records)) if number not in bad]]
        while ranges:
            numbers = ranges.pop()
            if self.why_bad([records[number] for number in numbers]) is None:
                continue
            if len(numbers) == 1:
                bad.add(numbers[0])
                continue
            middle = len(numbers) // 2
            ranges += [numbers[:middle], numbers[middle:]]
        return sorted(bad)

    def why_bad(self, records: Sequence[bytes]) -> str | None:
        """Returns what parsing these records raises, None if nothing."""
        try:
            self._traced(tf.constant(list(records), tf.string))
        except PARSE_ERRORS as error:
            return message_of(error)
        return None

    @functools.cached_property
    def _traced(self) -> Any:
        """The parser as a graph, which starts ten times as fast."""
        return tf.function(self, input_signature=[tf.TensorSpec((None,), tf.string)])

    def _looks_bad(self, record: bytes) -> bool:
        """Whether Python finds something wrong with a record."""
        return self._fault(record) is not None or b'"' in record

    def reason(self, record: bytes) -> str:
        """Returns in words what is wrong with a record that cannot be parsed."""
        fault = self._fault(record)
        if fault is None and b'"' in record:
            return "a quote that is not closed, or stands inside an unquoted field"
        return fault or self.why_bad([record]) or "cannot be parsed"

    def _fault(self, record: bytes) -> str | None:
        """Returns what is wrong with the number of fields, or with one of them."""
        form = self.format
        fields = split_fields(record, form.delimiter)
        if len(fields) != len(form.columns):
            return f"{len(fields)} fields, expected {len(form.columns)}"
        for column, value in zip(form.columns, fields, strict=True):
            if column.dtype == "string":
                continue
            is_missing = value in form.na_values
            if is_missing and column.dtype.startswith("int"):
                return (
                    f"column {column.name!r} is missing, which {column.dtype} cannot "
                    f"say; pass `dtypes={{{column.name!r}: 'float64'}}`"
                )
            if not is_missing and not is_number(value, column.dtype):
                return (
                    f"column {column.name!r} holds {value!r}, expected {column.dtype} "
                    "(see `dtypes`) or one of `na_values`"
                )
            if not is_missing and column.holds_integers and _is_rounded(value):
                return (
                    f"column {column.name!r} holds {value!r}, which float32 would "
                    f"round; pass `dtypes={{{column.name!r}: 'float64'}}`"
                )
        return None

    @property
    def _other_na_values(self) -> list[str]:
        """The spellings that TensorFlow does not take for missing by itself."""
        return [na for na in self.format.na_values if na and na.lower() != "nan"]

    def _default(self, column: Column, is_direct: bool) -> tf.Tensor:
        """Returns what stands for a missing value; an empty vector for none."""
        if column.dtype == "string" or not is_direct:
            return tf.constant("")
        dtype = tf.float64 if column.holds_integers else tf.as_dtype(column.dtype)
        if dtype.is_integer:
            return tf.constant([], dtype)
        return tf.constant(float("nan"), dtype)

    def _converted(self, values: tf.Tensor, column: Column) -> tf.Tensor:
        """Returns a column in its own dtype."""
        others = self._other_na_values
        dtype = tf.as_dtype(column.dtype)
        if values.dtype == tf.string and len(others) > 1:
            is_missing = values == ""
            for other in others:
                is_missing |= values == other
            gap = "nan" if dtype.is_floating else ""
            values = tf.where(is_missing, gap, values)
            if dtype != tf.string:
                wide = tf.float64 if column.holds_integers else dtype
                values = tf.strings.to_number(values, wide)
        if column.holds_integers:
            is_large = tf.abs(values) > MAX_FLOAT32_INTEGER
            is_exact = ~tf.reduce_any(is_large & tf.math.is_finite(values))
            told = [f"column {column.name!r} would be rounded"]
            with tf.control_dependencies([tf.debugging.Assert(is_exact, told)]):
                values = tf.cast(values, tf.float32)
        return values


def _is_rounded(value: str) -> bool:
    number = float(value)
    return MAX_FLOAT32_INTEGER < abs(number) < float("inf")
