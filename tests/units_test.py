"""Quantities as text: the unit, the digits, and the edges between units."""

import re

import pytest

from tfamp.records import units

TEXTS = {
    # In the largest unit that they fill; 1023.9 KiB is the next one's 1.0.
    units.format_bytes: {
        0: "0 bytes",
        1023: "1023 bytes",
        1024: "1.0 KiB",
        2**20 - 100: "1.0 MiB",
        -3 * 2**29: "-1.5 GiB",
        5000 * 2**50: "5,000 PiB",
    },
    units.format_seconds: {
        0: "0 s",
        12.34e-6: "12.3 us",
        0.99996e-3: "1.0 ms",
        1.0: "1.0 s",
        59.6: "1 min 00 s",
        3599.7: "1 h 00 min",
        7384: "2 h 03 min",
        -0.5: "-500 ms",
        1e-12: "1.0e-12 s",
        float("inf"): "inf s",
    },
    units.format_rate: {
        0.25: "0.2 examples/s",
        4971.3: "4,971 examples/s",
        2.5e6: "2,500,000 examples/s",
    },
    units.format_share: {0.0: "0.0 %", 0.0001: "< 0.1 %", 0.9125: "91.2 %"},
}


@pytest.mark.parametrize(
    "write, value, text",
    [
        (write, value, text)
        for write, rows in TEXTS.items()
        for value, text in rows.items()
    ],
    ids=[text for rows in TEXTS.values() for text in rows.values()],
)
def test_quantities_are_written_in_the_unit_and_digits_that_suit(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("1", 1),
        ("123456", 123456),
        ("100B", 100),
        ("2kB", 2000),
        ("3MB", 3_000_000),
        ("16GB", 16_000_000_000),
        ("0.5 TB", 500_000_000_000),
        ("1KiB", 1024),
        ("1.5MiB", 3 * 2**19),
        ("2 gib", 2**31),
        (".25TiB", 2**38),
    ],
)
def test_bytes_are_read_in_units_of_1000_and_of_1024(text, num_bytes):
    assert units.parse_bytes("limit", text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "0", "0.5", "-1GB", "GB", "16 G", "16 gigabytes", "1e9", "1.2.3GB"]
)
def test_what_is_no_number_of_bytes_is_refused(text):
    message = (
        f"`--max_memory` is {text!r}; expected a number of bytes, or one with a unit "
        "from kB to TB or from KiB to TiB. Write for example 16GB or 14.5GiB."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        units.parse_bytes("--max_memory", text)
