"""Where elements come from, and what is left out of them where they are damaged.

Arrays, datasets, generators, TensorFlow Datasets; paths, text, what files share.
"""

import gzip
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import careful, elements, write, write_records
from tests.refusals import refusals
from tfamp.data import Pipeline


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A builder of TensorFlow Datasets with six examples: i -> 10 i."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")

    class Pairs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"x": np.int64, "y": np.int64})
            return tfds.core.DatasetInfo(
                builder=self, features=features, supervised_keys=("x", "y")
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(6):
                yield i, {"x": i, "y": 10 * i}

    builder = Pairs(data_dir=str(tmp_path_factory.mktemp("tfds")))
    builder.download_and_prepare()
    return builder


def test_arrays_keep_dtypes_and_structure():
    x = {"image": np.zeros((3, 2), np.uint8), "name": np.array(["a", "b", "c"])}
    dataset = Pipeline.from_arrays(x, np.zeros(3, np.float16), np.ones(3)).build()
    x_spec, y_spec, weight_spec = dataset.element_spec
    assert x_spec["image"] == tf.TensorSpec((2,), tf.uint8)
    assert x_spec["name"] == tf.TensorSpec((), tf.string)
    assert (y_spec.dtype, weight_spec.dtype) == (tf.float16, tf.float64)


def test_a_builder_gives_pairs_in_the_same_order_each_time(pairs):
    dataset = Pipeline.from_tfds(pairs, "train").build()
    read = [(int(x), int(y)) for x, y in dataset]
    assert sorted(read) == [(i, 10 * i) for i in range(6)]
    assert [(int(x), int(y)) for x, y in dataset] == read
    assert int(dataset.cardinality()) == 6
    assert dataset.options().autotune.enabled is False
    with pytest.raises(ValueError, match="Unknown split"):
        Pipeline.from_tfds(pairs, "test")


WRONG_SOURCES = {
    "lengths": (
        lambda: Pipeline.from_arrays(np.zeros(3), np.zeros(4)),
        "Arrays have the lengths {'x': {3}, 'y': {4}}; expected one length",
    ),
    "list": (
        lambda: Pipeline.from_arrays([1, 2]),
        "`x` holds a list; expected an array",
        TypeError,
    ),
    "no dataset": (
        lambda: Pipeline.from_dataset(np.zeros(3)),
        "`dataset` is a ndarray; expected a tf.data.Dataset.",
        TypeError,
    ),
    "empty": (
        lambda: Pipeline.from_dataset(tf.data.Dataset.range(0)),
        "`dataset` has no elements; expected at least one.",
    ),
    "nothing to skip": (
        lambda: numbers().on_error("skip").build(),
        "`.on_error('skip')` has nothing to act on",
    ),
}
test_what_is_no_source_is_refused = refusals(WRONG_SOURCES)


def one_shot(num):
    """What people write: a generator that was called already, so it is read once."""
    generator = iter(range(num))
    spec = tf.TensorSpec((), tf.int64)
    made = tf.data.Dataset.from_generator(lambda: generator, output_signature=spec)
    return Pipeline.from_dataset(made)


FIRST = {
    "as it is": lambda p: p,
    "shuffled": lambda p: p.shuffle(seed=1),
    "cached": lambda p: p.cache("memory"),
    "batched": lambda p: p.batch(3).map(lambda x: x).prefetch(),
}


@pytest.mark.parametrize("write", FIRST.values(), ids=FIRST)
def test_a_generator_that_is_read_once_loses_no_element(write):
    dataset = write(one_shot(10)).build()
    found = np.concatenate([np.ravel(x) for x in dataset])
    assert sorted(found.tolist()) == list(range(10))


def test_the_second_epoch_of_a_generator_that_is_read_once_is_an_error():
    dataset = one_shot(4).batch(2).build()
    assert len(list(dataset)) == 2
    message = "generator.*makes a new one"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(dataset)


READ_FIRST = {
    "balance": lambda p: p.map(lambda x: (x, x % 2)).balance(seed=1),
    "subset": lambda p: p.subset(3),
}


@pytest.mark.parametrize("write", READ_FIRST.values(), ids=READ_FIRST)
def test_what_reads_all_elements_first_says_that_they_are_gone(write):
    pipeline = write(one_shot(10))
    errors = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(errors, match="generator|looked at|changed since"):
        list(pipeline.build())


# Numbers that `refuse` fails on, out of 200.
BAD = [x for x in range(200) if x % 50 == 7]


def refuse(x):
    """Fails on 7, 57, 107 and 157."""
    check = tf.debugging.assert_none_equal(
        x % 50, tf.constant(7, x.dtype), message="a seven"
    )
    with tf.control_dependencies([check]):
        return tf.cast(x, tf.float32) * 2


def numbers(n=200):
    return Pipeline.from_arrays(np.arange(n))


def values(dataset):
    return [float(x) for x in dataset]


def test_each_damaged_element_costs_itself_alone(caplog):
    pipeline = numbers().map(refuse).on_error("skip", max_fraction=0.02)
    dataset = pipeline.build()
    expected = [2.0 * x for x in range(200) if x not in BAD]
    for _ in range(2):  # a second epoch counts none of them again
        assert values(dataset) == expected
    assert [one.where for one in pipeline.skipped] == [f"element {x}" for x in BAD]
    assert {one.message for one in pipeline.skipped} == {"a seven"}
    assert "Skipped element 7: a seven." in caplog.text
    assert caplog.text.count("Skipped 4 of 200 elements (2.0 %)") == 1


def test_a_pass_in_which_nothing_can_be_read_is_an_error_whatever_is_allowed():
    dataset = Pipeline.from_arrays(np.array([7, 57])).map(refuse)
    dataset = dataset.on_error("skip", max_fraction=1.0).build()
    with pytest.raises(tf.errors.InvalidArgumentError, match="2 of 2.*one that can"):
        values(dataset)


def test_more_than_the_allowed_share_is_an_error_at_the_end_of_the_pass():
    dataset = numbers().map(refuse).on_error("skip", max_fraction=0.01).build()
    message = (
        "4 of 200 elements cannot be read; expected at most 1.0 % (`max_fraction`), "
        "and one that can. The first: element 7: a seven; element 57: a seven; "
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        values(dataset)


def test_an_error_of_the_source_itself_is_not_swallowed():
    broken = tf.data.Dataset.range(200).map(refuse)
    pipeline = Pipeline.from_dataset(broken).map(lambda x: x + 1).on_error("skip")
    with pytest.raises(tf.errors.InvalidArgumentError, match="a seven"):
        values(pipeline.build())


# How a file begins, a damaged line, and one that is whole.
DAMAGED = {".csv": (b"a,b\n", b"bad", b"1,0"), ".txt": (b"", b"\xff", b"fine")}


@pytest.mark.parametrize("ending", DAMAGED)
def test_what_sources_skip_is_summed_up_and_judged_exactly(tmp_path, ending, caplog):
    head, bad, fine = DAMAGED[ending]
    data = head + b"\n".join([bad] * 4 + [fine] * 196)
    source = MAKERS[ending](write(tmp_path / f"a{ending}", data))
    pipeline = source.on_error("skip", max_fraction=0.02)
    dataset = pipeline.batch(64).build()
    for _ in range(2):
        assert sum(1 for _ in dataset) == 4
    assert caplog.text.count("Skipped 4 of 200 elements (2.0 %)") == 1
    strict = source.on_error("skip", max_fraction=0.019).build()
    message = "4 of 200 elements cannot be read; expected at most 1.9 %"
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        list(strict)


def fill(folder, *names):
    for name in names:
        write(folder / name, f"{name}\n")
    return folder


def lines(paths):
    return [line.item().decode() for line in elements(Pipeline.from_text(paths))]


@pytest.mark.parametrize("name", ["run[1]", "a*b", "what?"], ids=str)
def test_signs_of_patterns_in_an_existing_folder_are_its_name(tmp_path, name):
    folder = fill(tmp_path / name, "b.txt", "a.txt", "deep/c.txt")
    fill(tmp_path, "run1/x.txt", "aXb/x.txt", "whats/x.txt")
    assert lines(str(folder / "*.txt")) == ["a.txt", "b.txt"]
    assert lines(str(folder / "*" / "*.txt")) == ["deep/c.txt"]


WRONG_PATHS = {
    "missing": ("none", "in `paths` is no file that ends in .txt"),
    "nearly right": ("train.tx", "Did you mean 'FOLDER/train.txt'?"),
    "no match": ("*.none", "FOLDER' has 'empty.md' and 'train.txt'."),
    "twice": (["train.txt", "t*.txt"], "`paths` names 'FOLDER/train.txt' twice;"),
    "empty": ("empty.md", "in `paths` has 0 bytes; expected at least one element."),
}


@pytest.mark.parametrize("paths, message", WRONG_PATHS.values(), ids=WRONG_PATHS)
def test_wrong_paths_are_refused_at_once(tmp_path, paths, message):
    fill(tmp_path, "train.txt")
    write(tmp_path / "empty.md", "")
    names = paths if isinstance(paths, list) else [paths]
    message = message.replace("FOLDER", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(message)):
        Pipeline.from_text([tmp_path / name for name in names])
    with pytest.raises(ValueError, match=re.escape("`paths` is []; expected at least")):
        Pipeline.from_text([])


def records(path, numbers):
    """Writes numbers as rows, lines or records, by the ending of a path."""
    if path.suffix == ".tfrecord":
        return write_records(path, [b"%d" % number for number in numbers])
    head = "a,b\n" if path.suffix == ".csv" else ""
    return write(path, head + "".join(f"{number},0\n" for number in numbers))


MAKERS = {
    ".csv": Pipeline.from_csv,
    ".txt": Pipeline.from_text,
    ".tfrecord": Pipeline.from_tfrecord,
}


@pytest.mark.parametrize("ending", MAKERS)
def test_a_changed_file_has_another_cache(tmp_path, ending):
    for num, expected in ((3, 1), (4, 2)):
        path = records(tmp_path / f"a{ending}", range(num))
        for _ in range(2):
            cached = MAKERS[ending](path).cache(tmp_path / "cache", unseen="error")
            assert len(list(cached.build())) == num
            assert sum(each.is_dir() for each in tmp_path.iterdir()) == expected


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_cut_gzip_file_is_an_error_that_names_it(tmp_path, ending):
    rng = np.random.default_rng(0)
    data = "a,b\n" + "".join(f"{n},{rng.bytes(200).hex()}\n" for n in range(3000))
    packed = gzip.compress(data.encode())
    path = write(tmp_path / f"a{ending}", packed[: len(packed) // 2])
    message = f"File {path!r} is damaged: "
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        elements(MAKERS[ending](path))


def test_a_line_that_is_no_text_costs_itself(tmp_path):
    write(tmp_path / "a.txt", "one\n\ntwo: é\n")
    path = write(tmp_path / "b.txt", b"three\n\nfo\xffr\nfive\n\xc3\n")
    found, skipped = careful(Pipeline.from_text(tmp_path), 0.9)
    assert found == [b"one", "two: é".encode(), b"three", b"five"]
    assert skipped == [
        (f"{path}, line 3", "byte 0xff at column 3 is no UTF-8"),
        (f"{path}, line 5", "byte 0xc3 at column 1 is no UTF-8"),
    ]
    message = f"{path}, line 3: byte 0xff at column 3 is no UTF-8."
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        elements(Pipeline.from_text(tmp_path))


CHANGES = {
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "Windows": lambda data: data.replace(b"\n", b"\r\n"),
    "no last line end": lambda data: data[:-1],
    "gzip in two parts": lambda data: b"".join(
        map(gzip.compress, (data[:2], data[2:]))
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_lines_are_those_of_files_of_other_programs(tmp_path, change):
    paths = [write(tmp_path / name, change(b"a\nb\n")) for name in ("1.txt", "2.txt")]
    paths.append(write(tmp_path / "3.txt", b"a\nb\n"))
    assert elements(Pipeline.from_text(paths)) == 3 * [b"a", b"b"]
