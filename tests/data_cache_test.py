"""The file cache: what another one is for, killed writers, full disks, damage."""

import errno
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.data_pipeline_test import double, numbers, rows
from tfamp.data import Pipeline
from tfamp.data.fingerprints import fingerprint

ROOT = Path(__file__).parents[1]


def caches(folder):
    """Returns the folders of the caches in a folder."""
    return sorted(path for path in folder.iterdir() if path.is_dir())


def left_in(folder):
    """Returns what is there beside the empty files that are locked."""
    return [
        path
        for path in folder.iterdir()
        if path.suffix != ".lock" or path.stat().st_size > 0
    ]


def only(folder):
    """Returns the only cache in a folder."""
    (found,) = caches(folder)
    return found


def test_a_second_pipeline_reads_what_the_first_one_wrote(tmp_path):
    log = tmp_path / "calls"

    def note():
        with log.open("a") as file:
            file.write(".")

    def count(x, y):
        tf.py_function(note, [], [])
        return x, y

    first = numbers().map(count).cache(tmp_path / "train").build()
    assert log.read_text() == 10 * "."  # filled by `build`
    second = numbers().map(count).cache(tmp_path / "train").build()
    assert rows(second) == rows(first) == rows(numbers().build())
    assert log.read_text() == 10 * "."
    assert int(second.cardinality()) == 10


def test_a_changed_function_is_noticed_where_plain_tf_data_reads_stale_elements(
    tmp_path,
):
    plain = tf.data.Dataset.range(3)
    list(plain.map(lambda x: x + 1).cache(str(tmp_path / "plain")))
    stale = plain.map(lambda x: x + 2).cache(str(tmp_path / "plain"))
    assert [int(x) for x in stale] == [1, 2, 3]

    first = numbers(3).map(double).cache(tmp_path / "train").build()
    fresh = numbers(3).map(lambda x, y: (x + 1, y)).cache(tmp_path / "train").build()
    assert rows(fresh) == [(1, 0), (2, 10), (3, 20)]
    assert len(caches(tmp_path)) == 2
    assert rows(first) == rows(numbers(3).map(double).build()), "it stays"


def test_a_half_written_cache_is_built_again(tmp_path, caplog):
    pytest.importorskip("filelock", reason="what is left is removed under a lock")
    rows(numbers().cache(tmp_path / "train").build())
    folder = only(tmp_path)
    largest = max(folder.glob("elements*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    left = tmp_path / f"{folder.name}.0123abcd.unfinished"
    left.mkdir()
    (left / "elements_0.lockfile").write_text("Created at: 1")
    (tmp_path / "train_of_another.txt").write_text("mine")
    dataset = numbers().cache(tmp_path / "train").build()
    assert "which a process that has ended left unfinished" in caplog.text
    assert rows(dataset) == rows(numbers().build())
    assert caches(tmp_path) == [folder]
    assert (tmp_path / "train_of_another.txt").read_text() == "mine"


def deadly(path):
    """Returns a pipeline that ends a process at its 600th element, if told to."""
    dies = f"{path}.dies"

    def stop(x):
        if x == 600 and os.path.exists(dies):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def look(x):
        return tf.ensure_shape(tf.py_function(stop, [x], tf.int64), ())

    return Pipeline.from_arrays(np.arange(1000)).map(look).cache(path)


def test_a_writer_that_was_killed_does_not_stop_the_next_one(tmp_path):
    path, dies = tmp_path / "train", tmp_path / "train.dies"
    dies.touch()
    program = "from tests.data_cache_test import deadly as d; import sys; "
    killed = subprocess.run(
        [sys.executable, "-c", program + "d(sys.argv[1]).build()", str(path)],
        cwd=ROOT,
        capture_output=True,
    )
    dies.unlink()
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    left = only(tmp_path)
    assert left.name.endswith(".unfinished")
    assert [int(x) for x in deadly(path).build()] == list(range(1000))
    # The same pipeline has the same name in every process.
    assert left.name.split(".")[0] in [path.name for path in caches(tmp_path)]


def test_where_locks_are_missing_a_cache_is_filled_and_read(tmp_path, monkeypatch):
    filelock = pytest.importorskip("filelock")

    def refuse(self, *args, **kwargs):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", refuse)
    dataset = numbers().cache(tmp_path / "train").build()
    assert rows(dataset) == rows(numbers().build())


def test_elements_without_end_are_no_cache(tmp_path):
    endless = Pipeline.from_dataset(tf.data.Dataset.range(3).repeat())
    pipeline = endless.filter(lambda x: x > 0).cache(tmp_path / "train")
    message = "would never be full: the elements before it repeat without end."
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_in_a_clear_error_and_leaves_nothing(tmp_path):
    pipeline = Pipeline.from_arrays(np.zeros((100, 1000))).cache(tmp_path / "train")
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="was full before the cache was whole"):
            pipeline.build()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_in(tmp_path) == []


def test_an_error_while_filling_leaves_nothing_but_what_others_wait_for(tmp_path):
    def fail(x, y):
        tf.debugging.assert_less(x, tf.constant(7, x.dtype), message="seven")
        return x, y

    pipeline = numbers().map(fail).cache(tmp_path / "train")
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="seven"):
            pipeline.build()
        assert left_in(tmp_path) == []


@pytest.mark.slow("a killed writer is above")
@pytest.mark.parametrize("locks", [[], ["--no_locks"]], ids=["locks", "none"])
def test_no_process_reads_what_is_half_written_or_of_another(locks):
    command = [sys.executable, "-m", "tests.cache_stress", "--reads=20", "--seed=1"]
    command += ["--processes=2", "--minutes=4", *locks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["read"] >= 20
    assert counts["wrong"] == 0
    assert counts["killed"] > 0


# Which changes of a program or its files give another cache, and which none.


def mapped(function):
    return numbers(3).map(lambda x, y: (function(x), y))


def adding(number):
    return lambda x: x + number


def lookup(number):
    words = tf.constant(["a", f"b{number}"])
    pairs = tf.lookup.KeyValueTensorInitializer(words, tf.constant([0, 1], tf.int64))
    table = tf.lookup.StaticHashTable(pairs, -1)
    return lambda x: table.lookup(tf.strings.as_string(x))


def by_python(number):
    def add(x):
        return x + number

    return lambda x: tf.ensure_shape(tf.numpy_function(add, [x], tf.int64), ())


# What a pipeline is made of, given 1 or 2.
MAKERS = {
    "a closure": lambda n: mapped(adding(n)),
    "an object": lambda n: mapped(functools.partial(tf.add, tf.constant(n, tf.int64))),
    "a variable": lambda n: mapped(adding(tf.Variable(n, dtype=tf.int64))),
    "a table": lambda n: mapped(lookup(n)),
    "a function of NumPy's": lambda n: mapped(by_python(n)),
    "a predicate": lambda n: numbers(3).filter(lambda x, y: x < n),
    "arrays": lambda n: Pipeline.from_arrays(np.arange(3) * n),
    "a dataset": lambda n: Pipeline.from_dataset(
        tf.data.Dataset.range(5).map(lambda x: x + n).shuffle(4, seed=1)
    ),
}


@pytest.mark.filterwarnings("ignore:The value of the smallest subnormal")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_change_gives_another_cache_and_the_same_does_not(make, tmp_path):
    found = []
    for pipeline in [make(1), make(1), make(2)]:  # together, so that none is reused
        pipeline.cache(tmp_path / "cache").build()
        found.append(len(caches(tmp_path)))
    assert found == [1, 1, 2]


PROGRAM = """
import numpy as np
import tensorflow as tf
import mine
from tfamp.data import Pipeline

SETTINGS = {"b": 1, "a": (2, 3)}

def scaled(x):
    x = tf.ensure_shape(tf.numpy_function(mine.scale, [x], tf.int64), ())
    return x + SETTINGS["b"]

pipeline = Pipeline.from_arrays(np.arange(1, 4)).map(scaled).cache("cache")
print(next(pipeline.build().as_numpy_iterator()))
"""


def test_what_a_function_uses_of_a_module_is_part_of_its_fingerprint(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    prints = []
    for factor in (1, 1, 2):
        sys.modules.pop("theirs", None)
        text = f"import json\n\ndef scale(x):\n    return x * {factor}\n"
        (tmp_path / "theirs.py").write_text(text)
        (tmp_path / "theirs_too.py").write_text("import theirs\n\nSIZE = 3\n")
        sys.modules.pop("theirs_too", None)
        importlib.invalidate_caches()
        module = importlib.import_module("theirs_too")
        prints.append(
            fingerprint([lambda module=module: module.SIZE], [], tf.TensorSpec(()))
        )
    assert prints[0] == prints[1] != prints[2]
    assert not prints[0].unseen


@pytest.mark.slow
def test_another_process_has_the_same_cache_until_a_module_changes(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = []
    for seed, factor in ((0, 1), (7, 1), (0, 2)):
        # Hashes of strings, which order sets, are others by seed.
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        (tmp_path / "mine.py").write_text(f"def scale(x):\n    return x * {factor}\n")
        printed = subprocess.check_output(
            [sys.executable, "-B", "program.py"], cwd=tmp_path, env=env, text=True
        )
        found.append((int(printed.split()[-1]), len(caches(tmp_path))))
    assert found == [(2, 1), (2, 1), (3, 2)]


# Photos and their masks, which somebody draws anew. A second run of a program either
# sees that or has said beforehand that it would not.


def draw(folder, shade):
    """Writes the same gray into all masks."""
    for number in range(3):
        pixels = np.full((4, 4 + shade // 100, 1), shade, np.uint8)
        png = tf.io.encode_png(pixels).numpy()
        (folder / "masks" / f"{number}.png").write_bytes(png)


@pytest.fixture
def folder(tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        for number in range(3):
            png = tf.io.encode_png(np.full((4, 4, 1), number, np.uint8)).numpy()
            (tmp_path / name / f"{number}.png").write_bytes(png)
    draw(tmp_path, 50)
    return tmp_path


def names(folder, name="images"):
    return sorted(str(path) for path in (folder / name).iterdir())


def mask_of(path):
    return tf.io.read_file(tf.strings.regex_replace(path, "/images/", "/masks/"))


def mask_by_python(path):
    def read(path):
        name = path.decode().replace("/images/", "/masks/")
        return Path(name).read_bytes()

    return tf.ensure_shape(tf.numpy_function(read, [path], tf.string), ())


def from_names(read):
    return lambda folder: Pipeline.from_arrays(np.array(names(folder))).map(read)


def slices(folder, name):
    return tf.data.Dataset.from_tensor_slices(names(folder, name))


UNSEEN = {
    "names in an array": from_names(mask_of),
    "read by Python": from_names(mask_by_python),
    "a folder of images": lambda folder: Pipeline.from_images(
        folder / "images", labels=None
    ).map(mask_of),
    "a dataset of names": lambda folder: Pipeline.from_dataset(
        slices(folder, "images").map(mask_of)
    ),
}


@pytest.mark.parametrize("program", UNSEEN.values(), ids=UNSEEN)
def test_files_that_are_not_seen_are_told_of_and_refused_if_asked(
    folder, program, caplog
):
    message = "would not notice changes in.*after the cache"
    with pytest.raises(ValueError, match=message):
        program(folder).cache(folder / "cache", unseen="error").build()
    assert not list(folder.glob("cache*"))
    program(folder).cache(folder / "cache").build()
    assert "does not notice changes in" in caplog.text
    assert "notice" in program(folder).cache(folder / "cache").describe()


SEEN = {
    "photos of a folder": lambda folder: Pipeline.from_images(
        folder / "masks", labels=None
    ).decode((4, 4)),
    "names of the masks in a dataset": lambda folder: Pipeline.from_dataset(
        slices(folder, "masks").map(tf.io.read_file)
    ),
    "each mask a dataset": lambda folder: Pipeline.from_dataset(
        slices(folder, "masks").interleave(
            lambda path: tf.data.Dataset.from_tensors(tf.io.read_file(path))
        )
    ),
}


@pytest.mark.quick("photos of a folder")
@pytest.mark.parametrize("program", SEEN.values(), ids=SEEN)
def test_files_that_are_known_by_name_need_no_warning(folder, program, caplog):
    found = []
    for shade in (50, 50, 250):
        if shade == 250:
            draw(folder, shade)
        cached = program(folder).cache(folder / "cache", unseen="error").build()
        found.append(str(list(cached.as_numpy_iterator())))
    assert found[0] == found[1] != found[2]
    assert "does not notice" not in caplog.text
