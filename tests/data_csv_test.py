"""CSV sources: types, gaps, quotes, chunks, lengths, bad rows, wrong files."""

import csv as stdlib_csv
import gzip
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import careful, elements, refused_files, write
from tfamp.data import Pipeline

NAN = math.nan


def columns(found):
    return {name: [row[name] for row in found] for name in found[0]}


TYPES = {
    "integers": (["1", "2"], tf.int64, [1, 2]),
    "largest int64": (["9223372036854775807", "0"], tf.int64, [2**63 - 1, 0]),
    "integers with gaps": (["16777217", "NA"], tf.float64, [16777217.0, NAN]),
    "huge with gaps": (["9007199254740993", ""], tf.string, [b"9007199254740993", b""]),
    "floats": (["0.5", "nan"], tf.float32, [0.5, NAN]),
    "timestamps": (["1700000000.25", "0"], tf.float64, [1700000000.25, 0.0]),
    "postal codes": (["01234", "98765"], tf.string, [b"01234", b"98765"]),
    "text": (["1", "x"], tf.string, [b"1", b"x"]),
    "gaps alone": (["NA", "nan"], tf.float32, [NAN, NAN]),
}


@pytest.mark.parametrize("is_damaged", [False, True], ids=["clean", "damaged"])
def test_types_hold_the_values_beside_damage_too(tmp_path, is_damaged):
    rows = zip(*(values for values, _, _ in TYPES.values()), strict=True)
    lines = [",".join(row) for row in (TYPES, *rows)]
    lines += ["oops"] if is_damaged else []
    pipeline = Pipeline.from_csv(write(tmp_path / "a.csv", "\n".join(lines)))
    spec = pipeline.build().element_spec
    found = columns(careful(pipeline)[0])
    for name, (_, dtype, expected) in TYPES.items():
        assert spec[name].dtype == dtype, name
        np.testing.assert_array_equal(found[name], expected, name)


ROWS = b'a,b\n1,x\n2,"y"\n'
COLUMNS = {"a": [1, 2], "b": [b"x", b"y"]}
# What a file holds, arguments, the columns that are read.
READ = {
    "delimiter": ('a\tb\n1\t"x\ty"\n', {}, {"a": [1], "b": [b"x\ty"]}),
    "text behind a quote": (
        'a,b\n1,"x"y\n2,x"y\n',
        {},
        {"a": [1, 2], "b": [b"xy", b'x"y']},
    ),
    "byte order mark": (b"\xef\xbb\xbf" + ROWS, {}, COLUMNS),
    "Windows": (ROWS.replace(b"\n", b"\r\n"), {}, COLUMNS),
    "gzip": (gzip.compress(ROWS), {}, COLUMNS),
}


@pytest.mark.parametrize("is_damaged", [False, True], ids=["clean", "damaged"])
@pytest.mark.parametrize("data, options, expected", READ.values(), ids=READ)
def test_columns_are_read(tmp_path, data, options, expected, is_damaged):
    data = data.encode() if isinstance(data, str) else data
    if is_damaged and not data.startswith(b"\x1f"):
        data += b"\noops\n"
    pipeline = Pipeline.from_csv(write(tmp_path / "a.csv", data), **options)
    found = columns(careful(pipeline)[0])
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


# What pandas reads as missing by default, and what other programs write.
GAPS = [
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"),
    *("1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
    *("?", "-", ".", " ?", " NA"),
]


@pytest.mark.parametrize("number, dtype", [("4.5", "float32"), ("4", "float64")])
def test_a_gap_in_any_spelling_leaves_numbers_numbers_and_texts_texts(
    tmp_path, number, dtype
):
    lines = ["age,city", *(f"{gap},{gap}" for gap in GAPS), f"{number},Oslo"]
    found = columns(
        elements(Pipeline.from_csv(write(tmp_path / "a.csv", "\n".join(lines))))
    )
    assert found["age"][0].dtype == dtype
    np.testing.assert_array_equal(found["age"], [NAN] * len(GAPS) + [float(number)])
    # "None" is a kind of basement, "-" an answer.
    assert [city.item().decode() for city in found["city"]] == [*GAPS, "Oslo"]


def test_quoted_fields_hold_delimiters_line_ends_and_quotes(tmp_path):
    texts = ["a,b", "two\nlines", "a\x1eb", 'say "hi"', "plain", "", '"', "z" * 300]
    texts.append("three\n\nlines,")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = stdlib_csv.writer(file)
        writer.writerow(["n", "text"])
        writer.writerows([[n, text] for n, text in enumerate(texts * 3)])
    found = elements(Pipeline.from_csv(tmp_path / "a.csv"))
    expected = [(n, text.encode()) for n, text in enumerate(texts * 3)]
    assert [(row["n"].item(), row["text"].item()) for row in found] == expected


BAD_ROWS = {
    "too few fields": ("4", "1 fields, expected 3"),
    "too many fields": ("4,5,x,7", "4 fields, expected 3"),
    "no number": (
        "4,five,x",
        "column 'b' holds 'five', expected float32 (see `dtypes`)",
    ),
    "gap in integers": (
        ",5,x",
        "column 'a' is missing, which int64 cannot say; pass `dtypes={'a': 'float64'}`",
    ),
    "no text": (b"4,\xff,x", "column 'b' holds '\ufffd', expected float32"),
    "open quote": ('4,5,"xy', "a quote that is not closed"),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_bad_rows_cost_themselves_and_are_named_by_line(tmp_path, pack):
    lines = [f"{n},{n}.5,t{n}".encode() for n in range(300)]
    bad = {101 + 30 * n: row for n, row in enumerate(BAD_ROWS.values())}
    for number, (line, _) in bad.items():
        lines[number] = line if isinstance(line, bytes) else line.encode()
    data = b"a,b,c\n" + b"\n".join(lines) + b"\n"
    path = write(tmp_path / "a.csv", pack(data))
    pipeline = Pipeline.from_csv(path, dtypes={"a": "int64", "b": "float32"})
    found, skipped = careful(pipeline)
    assert columns(found)["a"] == [number for number in range(300) if number not in bad]
    for (where, message), n in zip(skipped, bad, strict=True):
        assert where == f"{path}, line {n + 2}"
        assert message.startswith(bad[n][1])
    message = re.escape(f"{path}, line {min(bad) + 2}: 1 fields, expected 3")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        elements(pipeline)


@pytest.mark.parametrize("columns", [None, ["a"]], ids=["read", "passed over"])
def test_a_quote_that_is_never_closed_does_not_eat_rows(tmp_path, columns):
    opened = (500, 900)
    lines = [f"{n},t{n}" for n in range(2000)]
    for number in opened:
        lines[number] = f'{number},"t{number}'
    path = write(tmp_path / "a.csv", "a,b\n" + "\n".join(lines) + "\n")
    found, skipped = careful(Pipeline.from_csv(path, columns=columns))
    assert [row["a"] for row in found] == [n for n in range(2000) if n not in opened]
    places = [where for where, _ in skipped]
    assert places == [f"{path}, line {number + 2}" for number in opened]


AB = "a,b\n1,2\n"
REFUSED = {
    "begins with 'a' and 'b' and has no rows; expected the names": ("a,b\n",),
    "is no file that ends in .csv, .tsv, .txt or": ({},),
    "Unknown `label` 'aeg'; expected 'age' or 'b'. Did you mean 'age'?": (
        *("age,b\n1,2\n", {"label": "aeg"}),
    ),
    "Unknown `dtypes['a']` 'float'; expected 'float32',": (
        *(AB, {"dtypes": {"a": float}}),
    ),
    "has other columns than": ({"a.csv": AB, "b.csv": "a,c\n1,2\n"},),
    "begins with 'a' and 'a'": ("a,a\n1,2\n",),
    "begins with '1.5' and '2' and has more rows": ("1.5,2\n3,4\n",),
    "expected a feature": (AB, {"label": "a", "columns": ["a"]}),
    "is in UTF-16, or no text; expected text in UTF-8.": (AB.encode("utf-16"),),
    "is in UTF-16, or no text": (AB.encode("utf-16-le"),),  # without a mark
}
test_wrong_files_and_arguments_are_refused_at_once = refused_files(
    Pipeline.from_csv,
    REFUSED,
    lambda data: data if type(data) is dict else {"a.csv": data},
)
