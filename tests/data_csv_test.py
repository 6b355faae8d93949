"""CSV sources: types, gaps, quotes, chunks, lengths, bad rows, wrong files."""

import csv as stdlib_csv
import gzip
import math
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import RAISE, refused_files, skip, skipped, write
from tfamp.data.sources import _csv_rows
from tfamp.data.sources.csv import csv_source
from tfamp.data.stages import Settings


def plain(dataset):
    for element in dataset.as_numpy_iterator():
        yield tf.nest.map_structure(np.asarray, element)


def rows_of(source, settings=RAISE):
    return list(plain(source.dataset(settings)))


def columns_of(source, settings=RAISE):
    """Returns the values of each column, read many at a time."""
    batches = list(source.dataset(settings).batch(1000).as_numpy_iterator())
    return {name: sum((b[name].tolist() for b in batches), []) for name in batches[0]}


def column(source, name, settings=RAISE):
    return columns_of(source, settings)[name]


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes blocks of a few rows, so that a small file has many."""
    monkeypatch.setattr(_csv_rows, "BLOCK_BYTES", 20)


def test_rows_are_dicts_of_scalars(tmp_path):
    path = write(tmp_path / "a.csv", "n,x,name\n1,0.5,ann\n2,-1e3,bob\n")
    dataset = csv_source(path).dataset(RAISE)
    assert dataset.element_spec == {
        "n": tf.TensorSpec((), tf.int64),
        "x": tf.TensorSpec((), tf.float32),
        "name": tf.TensorSpec((), tf.string),
    }
    assert int(dataset.cardinality()) == 2
    found = [tuple(part.item() for part in row.values()) for row in plain(dataset)]
    assert found == [(1, 0.5, b"ann"), (2, -1000.0, b"bob")]


def test_a_label_stands_apart(tmp_path):
    path = write(tmp_path / "a.csv", "y,a,b\n7,1,2\n8,3,4\n")
    source = csv_source(path, label="y", columns=["b", "y"])
    found = [(list(x.items()), y.item()) for x, y in plain(source.dataset(RAISE))]
    assert found == [([("b", 2)], 7), ([("b", 4)], 8)]


TYPES = {
    "integers": (["1", "2"], tf.int64, [1, 2]),
    "beyond float32": (["16777217", "-3"], tf.int64, [16777217, -3]),
    "largest int64": (["9223372036854775807", "0"], tf.int64, [2**63 - 1, 0]),
    "integers with gaps": (["1", ""], tf.float32, [1.0, math.nan]),
    "large with gaps": (["16777217", "NA"], tf.float64, [16777217.0, math.nan]),
    "huge with gaps": (["9007199254740993", ""], tf.string, [b"9007199254740993", b""]),
    "floats": (["0.5", "nan"], tf.float32, [0.5, math.nan]),
    "timestamps": (["1700000000.25", "0"], tf.float64, [1700000000.25, 0.0]),
    "exponents": (["1e5", "-inf"], tf.float32, [1e5, -math.inf]),
    "postal codes": (["01234", "98765"], tf.string, [b"01234", b"98765"]),
    "text": (["1", "x"], tf.string, [b"1", b"x"]),
    "gaps alone": (["NA", "nan"], tf.float32, [math.nan, math.nan]),
    "beyond int64": (["9223372036854775808", "1"], tf.float64, [2.0**63, 1.0]),
}


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """All of `TYPES` as the columns of one file: spec and values by name."""
    rows = zip(*(values for values, _, _ in TYPES.values()), strict=True)
    lines = [",".join(row) for row in (TYPES, *rows)]
    path = tmp_path_factory.mktemp("typed") / "a.csv"
    dataset = csv_source(write(path, "\n".join(lines))).dataset(RAISE)
    found = list(plain(dataset))
    return dataset.element_spec, {
        name: [row[name].item() for row in found] for name in TYPES
    }


@pytest.mark.parametrize("name", TYPES, ids=TYPES)
def test_types_hold_the_values(typed, name):
    spec, found = typed
    _, dtype, expected = TYPES[name]
    assert spec[name].dtype == dtype
    np.testing.assert_array_equal(found[name], expected)


def test_given_types_hold(tmp_path):
    path = write(tmp_path / "a.csv", "a,b,c,d\n1,2,3,4\n")
    wanted = {"a": tf.float64, "b": "int32", "c": np.float32, "d": str}
    spec = csv_source(path, dtypes=wanted).dataset(RAISE).element_spec
    dtypes = [one.dtype.name for one in spec.values()]
    assert dtypes == ["float64", "int32", "float32", "string"]


NAN = math.nan
ROWS = b'a,b\n1,x\n2,"y"\n'
COLUMNS = {"a": [1, 2], "b": [b"x", b"y"]}
GAPS = {"x": [1.5, NAN, NAN], "i": [1.0, NAN, 3.0], "t": [b"a", b"", b""]}
# What a file holds, arguments, the columns that are read.
READ = {
    "order": ("a,b,c\n1,2,3\n", {"columns": ["c", "a"]}, {"c": [3], "a": [1]}),
    "gaps": (
        "x,t\n1.5,a\n,\nNA,NA\nnan,b\n",
        {},
        {"x": [1.5, NAN, NAN, NAN], "t": [b"a", b"", b"", b"b"]},
    ),
    "a mark of gaps": ("x,i,t\n1.5,1,a\n?,?,?\n,3,\n", {"na_values": ["?"]}, GAPS),
    "three marks of gaps": (
        "x,i,t\n1.5,1,a\nnone,-,?\n,3,\n",
        {"na_values": ["?", "-", "none"]},
        GAPS,
    ),
    "no header": ("1,2\n3\n", {"header": False}, {"column_0": [1], "column_1": [2]}),
    "names": ("1,2\n", {"header": False, "column_names": "uv"}, {"u": [1], "v": [2]}),
    "numbers as names": ("0,1\n5,6\n", {}, {"0": [5], "1": [6]}),
    "delimiter": ('a\tb\n1\t"x\ty"\n', {"delimiter": "\t"}, {"a": [1], "b": [b"x\ty"]}),
    "text behind a quote": (
        'a,b\n1,"x"y\n2,x"y\n',
        {},
        {"a": [1, 2], "b": [b"xy", b'x"y']},
    ),
    "text behind a quote beside damage": (
        'a,b\n1,"x"y\n2,x"y\noops\n',
        {},
        {"a": [1, 2], "b": [b"xy", b'x"y']},
    ),
    "byte order mark": (b"\xef\xbb\xbf" + ROWS, {}, COLUMNS),
    "Windows": (ROWS.replace(b"\n", b"\r\n"), {}, COLUMNS),
    "empty lines": (ROWS.replace(b"\n", b"\n\n"), {}, COLUMNS),
    "no last line end": (ROWS[:-1], {}, COLUMNS),
    "gzip": (gzip.compress(ROWS), {}, COLUMNS),
}


@pytest.mark.quick("three marks of gaps", "names", "numbers as names")
@pytest.mark.parametrize("data, options, expected", READ.values(), ids=READ)
def test_columns_are_read(tmp_path, data, options, expected):
    source = csv_source(write(tmp_path / "a.csv", data), **options)
    found = columns_of(source, skip())
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
        assert type(found[name][0]) is type(values[0])


def test_quoted_fields_hold_delimiters_line_ends_and_quotes(tmp_path, small_blocks):
    texts = ["a,b", "two\nlines", "a\x1eb", 'say "hi"', "plain", "", '"', "z"]
    texts.append("three\n\nlines,")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = stdlib_csv.writer(file)
        writer.writerow(["n", "text"])
        writer.writerows([[n, text] for n, text in enumerate(texts * 3)])
    source = csv_source(tmp_path / "a.csv")
    found = [(row["n"].item(), row["text"].item()) for row in rows_of(source)]
    assert found == [(n, text.encode()) for n, text in enumerate(texts * 3)]
    assert source.num_examples == 27


def test_many_files_follow_one_another(tmp_path, small_blocks):
    for file in range(3):
        numbers = "".join(f"{100 * file + n},0\n" for n in range(50))
        write(tmp_path / f"{file}.csv", "n,z\n" + numbers)
    source = csv_source(tmp_path / "*.csv")
    expected = [100 * file + n for file in range(3) for n in range(50)]
    assert column(source, "n") == expected
    assert source.num_examples == 150
    assert column(csv_source(tmp_path), "n", Settings(4, True)) == expected


def test_chunks_hold_the_same_rows(tmp_path, small_blocks):
    text = "n,y\n" + "".join(f"{n},{n % 3}\n" for n in range(50))
    source = csv_source(write(tmp_path / "a.csv", text), label="y")
    chunks = source.chunks(RAISE)
    assert chunks.element_spec[0]["n"] == tf.TensorSpec((None,), tf.int64)
    found = list(chunks.as_numpy_iterator())
    assert len(found) > 5
    assert np.concatenate([x["n"] for x, _ in found]).tolist() == list(range(50))
    assert np.concatenate([y for _, y in found]).tolist() == [n % 3 for n in range(50)]
    batches = chunks.rebatch(8)
    assert [len(y) for _, y in batches] == [8] * 6 + [2]


BAD_ROWS = {
    "too few fields": ("4", "1 fields, expected 3"),
    "too many fields": ("4,5,x,7", "4 fields, expected 3"),
    "no number": (
        "4,five,x",
        "column 'b' holds 'five', expected float32 (see `dtypes`) or one of "
        "`na_values`",
    ),
    "gap in integers": (
        ",5,x",
        "column 'a' is missing, which int64 cannot say; pass `dtypes={'a': 'float64'}`",
    ),
    "no text": (b"4,\xff,x", "column 'b' holds '\ufffd', expected float32"),
    "open quote": ('4,5,"xy', "a quote that is not closed, or stands"),
}


def test_bad_rows_cost_themselves(tmp_path):
    lines = [f"{n},{n}.5,t{n}".encode() for n in range(300)]
    bad = {101 + 30 * n: row for n, row in enumerate(BAD_ROWS.values())}
    for number, (line, _) in bad.items():
        lines[number] = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.csv", b"a,b,c\n" + b"\n".join(lines) + b"\n")
    settings = skip()
    source = csv_source(path, num_infer_rows=100)
    expected = [number for number in range(300) if number not in bad]
    assert column(source, "a", settings) == expected
    for (where, message), n in zip(skipped(settings), bad, strict=True):
        assert where == f"{path}, line {n + 2}"
        assert message.startswith(bad[n][1])


@pytest.mark.parametrize("bad, reason", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_where_it_is_not_skipped(tmp_path, bad, reason):
    path = write(tmp_path / "a.csv", "a,b,c\n1,2.5,x\n")
    source = csv_source(path)
    bad = bad if isinstance(bad, bytes) else bad.encode()
    write(tmp_path / "a.csv", b"a,b,c\n3,4.5,y\n\n" + bad + b"\n5,6.5,z\n")
    message = re.escape(f"{path}, line 4: {reason}")
    with pytest.raises(ValueError, match=message):
        list(source.read(RAISE))


def test_a_bad_row_ends_a_pass_where_it_is_not_skipped(tmp_path):
    good = write(tmp_path / "a.csv", "a,b\n1,2.5\n")
    path = write(tmp_path / "b.csv", "a,b\n1,2.5\nx,3.5\n")
    dataset = csv_source([good, path]).dataset(RAISE)
    message = re.escape(f"{path}, line 3: column 'a' holds 'x', expected int64")
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)


def test_lines_are_counted_through_quoted_line_ends_and_empty_lines(tmp_path):
    path = write(tmp_path / "a.csv", 'a,b\n1,"x\ny"\n\n2,z\noops\n3,"v\nw"\n4,u,u\n')
    settings = skip()
    assert column(csv_source(path), "a", settings) == [1, 2, 3]
    places = [where for where, _ in skipped(settings)]
    assert places == [f"{path}, line 6", f"{path}, line 9"]


@pytest.mark.parametrize("sign", ["", "-"], ids=["positive", "negative"])
def test_integers_with_gaps_are_never_rounded(sign, tmp_path):
    lines = [f"{n},0" for n in range(100)]
    lines[3], lines[80], lines[90] = ",0", f"{sign}16777216,0", f"{sign}16777217,0"
    path = write(tmp_path / "a.csv", "a,b\n" + "\n".join(lines))
    source = csv_source(path, num_infer_rows=50)
    message = (
        f"{path}, line 92: column 'a' holds '{sign}16777217', which float32 would "
        "round; pass `dtypes={'a': 'float64'}`"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        list(source.chunks(RAISE))
    exact = csv_source(path, num_infer_rows=50, dtypes={"a": "float64"})
    assert column(exact, "a")[90] == float(f"{sign}16777217")


@pytest.mark.parametrize("opened", [(500,), (500, 900)], ids=["one", "two"])
@pytest.mark.parametrize("columns", [None, ["a"]], ids=["read", "passed over"])
def test_a_quote_that_is_never_closed_does_not_eat_rows(tmp_path, opened, columns):
    lines = [f"{n},t{n}" for n in range(2000)]
    for number in opened:
        lines[number] = f'{number},"t{number}'
    path = write(tmp_path / "a.csv", "a,b\n" + "\n".join(lines) + "\n")
    settings = skip()
    source = csv_source(path, columns=columns)
    assert column(source, "a", settings) == [n for n in range(2000) if n not in opened]
    places = [where for where, _ in skipped(settings)]
    assert places == [f"{path}, line {number + 2}" for number in opened]


def test_records_longer_than_a_block_are_whole(tmp_path, small_blocks):
    texts = ["x" * 10, "y" * 300, 'z\n"' * 100, "w"]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        stdlib_csv.writer(file).writerows([["n", "text"], *enumerate(texts)])
    found = column(csv_source(tmp_path / "a.csv"), "text")
    assert found == [text.encode() for text in texts]


AB = "a,b\n1,2\n"
REFUSED = {
    "has a header and no rows; expected at least one.": ("a,b\n",),
    "holds only empty lines; expected rows.": ("\n\n",),
    "has no file that ends in .csv, .tsv, .txt or": ({},),
    "has 1 column, 'a;b', with `delimiter` ','; expected more. Did you mean "
    "`delimiter=';'`?": ("a;b\n1;2\n",),
    "`label` names the column 'aeg', which the files lack; expected one of their 2, "
    "'age' and 'b'. Did you mean 'age'?": ("age,b\n1,2\n", {"label": "aeg"}),
    "`columns` names the column 'z', which the files lack": (AB, {"columns": ["z"]}),
    "`dtypes` names the column 'c', which the files lack": (AB, {"dtypes": {"c": int}}),
    "Unknown `dtypes['a']` 'float'; expected 'float32',": (
        AB,
        {"dtypes": {"a": float}},
    ),
    "it lacks 'b' and has 'c' in addition. Expected the same in all files.": (
        {"a.csv": AB, "b.csv": "a,c\n1,2\n"},
    ),
    "it has them in another order. Expected the same in all files.": (
        {"a.csv": AB, "b.csv": "b,a\n1,2\n"},
    ),
    "names 'a' more than once;": ("a,a\n1,2\n",),
    "holds numbers, '1.5' and '2'; expected the names of the columns. Pass "
    "`header=False`.": ("1.5,2\n3,4\n",),
    "`column_names` has 1 names and file": (
        *("1,2\n", {"header": False, "column_names": ["a"]}),
    ),
    "`column_names` is ('a',) and `header` True; expected names only for": (
        *(AB, {"column_names": ["a"]}),
    ),
    "Only the label 'a' is selected; expected a feature beside it.": (
        *(AB, {"label": "a", "columns": ["a"]}),
    ),
    "`delimiter` is ', '; expected one character, no quote.": (AB, {"delimiter": ", "}),
    "is in UTF-16; expected text in UTF-8.": (AB.encode("utf-16"),),
    "`columns` is 'a'; expected a sequence of": (AB, {"columns": "a"}, TypeError),
    "`na_values` is 'a'; expected a sequence of": (AB, {"na_values": "a"}, TypeError),
}

test_wrong_files_and_arguments_are_refused_at_once = refused_files(
    csv_source, REFUSED, lambda data: data if type(data) is dict else {"a.csv": data}
)


def test_without_arrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", "a,b\n1,2\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = "`Pipeline.from_csv` needs pyarrow, which is not installed. Run `pip "
    with pytest.raises(ImportError, match=re.escape(message)):
        csv_source(path)


def test_the_source_explains_itself(tmp_path):
    path = write(tmp_path / "a.csv", "a,b,c\n1,2.5,x\n3,4.5,y\n")
    what, why = csv_source(path).explain(None)
    assert what == "CSV, 1 file, 2 rows"
    assert why == "1 float32, 1 int64, 1 string, by the first 2 rows; gaps are NaN"
