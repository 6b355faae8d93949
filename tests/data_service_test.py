"""The data service: what is refused, exact shares in order, workers that die.

Two worker processes serve all tests that need real ones; the others hand plain
datasets to the reading side, which cannot tell them from a worker's.
"""

import gzip
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tfamp.data import Pipeline, _service_reading, service_worker
from tfamp.data._service_graph import check_beginning, check_functions
from tfamp.data._service_processes import LocalWorker
from tfamp.data.service import Service, ServiceError

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 100


def within_limit(do):
    """Returns what `do` returns, or fails where it hangs."""
    found = []

    def call():
        try:
            found.append((do(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert found, "it hangs"
    value, error = found[0]
    if error is not None:
        raise error
    return value


def numbers(size=103):
    """What upstream steps mean is seen in which of 1000 numbers come, and when."""
    return tf.data.Dataset.range(1000).shuffle(1000, seed=3).take(size)


def in_any_order(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


REFUSED = {
    "shuffle": (lambda r: r.shuffle(5), "`dataset` shuffles without a seed;"),
    "shuffle inside": (
        lambda r: r.interleave(lambda x: tf.data.Dataset.range(x).shuffle(5)),
        "`dataset` shuffles without a seed;",
    ),
    "sample": (
        lambda r: tf.data.Dataset.sample_from_datasets([r, r]),
        "`dataset` draws from `Dataset.random` without a seed",
    ),
    "random filter": (
        lambda r: r.filter(lambda x: tf.random.uniform(()) < 0.5),
        "`dataset` draws random numbers (RandomUniform) and chooses elements;",
    ),
    "order": (
        lambda r: r.map(tf.abs, num_parallel_calls=2, deterministic=False),
        "`dataset` gives its elements in no fixed order (`deterministic=False`);",
    ),
    "order by options": (in_any_order, "in no fixed order"),
    "file cache": (
        lambda r: r.cache("folder/shared"),
        "`dataset` caches into the file 'folder/shared';",
    ),
    "generator": (
        lambda r: tf.data.Dataset.from_generator(
            lambda: iter([1]), output_signature=tf.TensorSpec((), tf.int32)
        ),
        "`dataset` calls Python (PyFunc): a generator, `py_function`",
    ),
    "py_function": (
        lambda r: r.map(lambda x: tf.py_function(abs, [x], tf.int64)),
        "`dataset` calls Python (EagerPyFunc): a generator, `py_function`",
    ),
}


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_a_beginning_that_differs_from_process_to_process_is_refused(make, message):
    dataset = make(tf.data.Dataset.range(10))
    with pytest.raises(ValueError, match=re.escape(message)):
        check_beginning(dataset)


ACCEPTED = {
    "seeds": lambda r: r.shuffle(5, seed=1, reshuffle_each_iteration=False),
    "seeded sample": lambda r: tf.data.Dataset.sample_from_datasets([r, r], seed=1),
    "memory cache": lambda r: r.cache(),
    "random values": lambda r: r.map(lambda x: tf.random.uniform(())),
    "plain filter": lambda r: r.filter(lambda x: x > 3),
    "table": lambda r: r.map(
        tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(np.arange(3), np.arange(3)), -1
        ).lookup
    ),
    "strings": lambda r: tf.data.Dataset.from_tensor_slices(["a", "b"]),
}


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_a_beginning_that_is_alike_everywhere_is_accepted(make):
    assert check_beginning(make(tf.data.Dataset.range(10))) is None


def test_a_global_seed_makes_a_shuffle_alike_everywhere():
    tf.random.set_seed(1)
    try:
        dataset = tf.data.Dataset.range(10).shuffle(5)
    finally:
        tf.random.set_seed(None)
    assert check_beginning(dataset) is None


def test_work_may_shuffle_without_a_seed_but_not_call_python():
    share = tf.data.Dataset.range(10)
    assert check_functions(share.shuffle(5)) is None
    mapped = share.map(lambda x: tf.numpy_function(np.abs, [x], tf.int64))
    with pytest.raises(ValueError, match=re.escape("`dataset` calls Python (PyFunc")):
        check_functions(mapped)


# Reading, with datasets in the place of workers.


class Workers:
    """Stands for a service whose workers are the datasets given."""

    stall_seconds = 100.0
    workers = ("first", "second")

    def __init__(self, problem=None):
        self.problem = problem
        self.readers = []

    def check(self):
        if self.problem:
            raise ServiceError(self.problem)


def chunks_of(*epoch):
    """Returns endless numbered chunks of an epoch, as a worker gives them."""

    def generate():
        while True:
            yield from [np.array(chunk, np.int64) for chunk in (*epoch, [])]

    spec = tf.TensorSpec([None], tf.int64)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return dataset.map(lambda chunk: (chunk,)).enumerate()


def rows_of(blocks):
    return [int(value) for (block,) in blocks for value in block]


def test_elements_of_two_workers_come_in_turn_epoch_after_epoch():
    chunks = [chunks_of([0, 2, 4], [6, 8]), chunks_of([1, 3, 5], [7])]
    workers = Workers()
    streams = _service_reading.Streams(chunks, workers)
    for _ in range(2):
        assert within_limit(lambda: rows_of(streams.epoch())) == list(range(9))
    streams.stop()
    assert [reader.join(LIMIT_SECONDS) for reader in workers.readers] == [True, True]


def test_a_worker_whose_share_ended_is_passed_over():
    chunks = [chunks_of([0]), chunks_of([1, 2], [3])]
    streams = _service_reading.Streams(chunks, Workers())
    for _ in range(2):
        assert within_limit(lambda: rows_of(streams.epoch())) == [0, 1, 2, 3]
    streams.stop()


def fails_to_read(chunks, message, error=ServiceError, problem=None, **options):
    streams = _service_reading.Streams([chunks], Workers(problem), **options)
    with pytest.raises(error, match=re.escape(message)):
        within_limit(lambda: rows_of(streams.epoch()))
    streams.stop()


@pytest.mark.parametrize("skipped", [1, -1], ids=["lost", "doubled"])
def test_a_chunk_that_is_lost_or_doubled_is_an_error(skipped):
    wrong = chunks_of([0], [1], [2]).map(
        lambda number, chunk: (number + skipped * tf.cast(number > 1, tf.int64), chunk)
    )
    message = f"Worker 0 (first) gave chunk {2 + skipped}; expected 2. It was started"
    fails_to_read(wrong, message)


@pytest.fixture
def silent():
    """Chunks that never come, until the test is over."""
    done = threading.Event()

    def generate():
        done.wait(LIMIT_SECONDS)
        yield np.zeros(0, np.int64)

    spec = tf.TensorSpec([None], tf.int64)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    yield dataset.map(lambda chunk: (chunk,)).enumerate()
    done.set()


def test_a_worker_that_says_nothing_is_waited_for_as_long_as_asked(silent):
    hours = iter(range(100))
    message = "Worker 0 (first) gave nothing for 1 min 40 s, though it runs; expected"
    fails_to_read(silent, message, clock=lambda: 3600.0 * next(hours))


def test_a_worker_that_is_gone_is_not_waited_for(silent):
    fails_to_read(silent, "it is gone", problem="it is gone")


def test_an_error_of_the_users_function_is_told():
    def fail(number, chunk):
        part = tf.debugging.check_numerics(tf.math.log(-1.0), "of the function")
        return number, (tf.fill([1], part),)

    error = tf.errors.InvalidArgumentError
    fails_to_read(chunks_of([1]).map(fail), "of the function", error)


def test_whole_epochs_share_one_stream_and_parallel_ones_do_not(monkeypatch):
    opened = []
    streams = _service_reading.Streams
    monkeypatch.setattr(
        _service_reading, "Streams", lambda *a: opened.append(streams(*a)) or opened[-1]
    )
    epochs = _service_reading.Epochs([chunks_of([0, 1])], Workers())
    for _ in range(3):
        rows_of(epochs())
    assert len(opened) == 1
    first, second = epochs(), epochs()
    assert [next(first)[0].tolist(), next(second)[0].tolist()] == [[0, 1], [0, 1]]
    assert len(opened) == 2
    for blocks in (first, second):
        blocks.close()


WRONG_ARGUMENTS = {
    "count": (lambda: Service(0), "`num_workers` is 0; expected an integer"),
    "stall": (
        lambda: Service(1, stall_seconds=0),
        "`stall_seconds` is 0.0; expected a finite number above 0.",
    ),
    "none": (lambda: Service.at([]), "`addresses` is []; expected at least"),
    "text": (
        lambda: Service.at("a:1"),
        "`addresses` is 'a:1'; expected a list of 'host:port'.",
        TypeError,
    ),
    "twice": (
        lambda: Service.at(["a:1", "a:1"]),
        "`addresses` is ['a:1', 'a:1']; expected at least one, each once",
    ),
    "no port": (
        lambda: Service.at(["localhost"]),
        "`addresses` holds 'localhost'; expected 'host:port'",
    ),
}


test_wrong_arguments_are_refused = refusals(WRONG_ARGUMENTS)


def test_a_worker_elsewhere_that_does_not_answer_is_an_error_at_once():
    def refuse(address):
        if address == "b:2":
            raise OSError("refused")

    assert len(Service.at(["a:1"], _connect=refuse).workers) == 1
    message = "Worker 1 of 2 (b:2) does not answer within 3.0 s (refused); expected"
    with pytest.raises(ServiceError, match=re.escape(message)):
        Service.at(["a:1", "b:2"], _connect=refuse)


def test_a_closed_service_says_so():
    with Service.at(["a:1"], _connect=lambda address: None) as service:
        assert repr(service) == "Service(1 workers: a:1)"
    with pytest.raises(ServiceError, match=re.escape("This `Service` is closed;")):
        service.distribute(tf.data.Dataset.range(3), lambda share: share)


def test_elements_that_cannot_be_sent_are_refused():
    service = Service.at(["a:1"], _connect=lambda address: None)
    windows = tf.data.Dataset.range(4).window(2)
    with pytest.raises(TypeError, match="Elements hold DatasetSpec"):
        service.distribute(windows, lambda share: share)


def test_a_worker_that_ends_while_it_starts_tells_its_last_words():
    code = "import sys; sys.exit('no such library')"
    worker = LocalWorker([sys.executable, "-c", code])
    message = "ended with status 1; expected it to serve on loopback. It wrote last: "
    with pytest.raises(ServiceError, match=re.escape(message + "'no such library'")):
        worker.wait_until_ready(time.monotonic() + LIMIT_SECONDS)
    worker.stop()


def test_a_worker_that_is_not_ready_in_time_is_an_error():
    worker = LocalWorker([sys.executable, "-c", "input()"], clock=lambda: 10.0)
    with pytest.raises(ServiceError, match="is not ready in time; expected it"):
        worker.wait_until_ready(10.0)
    worker.stop()
    assert worker.problem() == "was ended by SIGKILL"


def test_a_worker_ends_with_the_pipe_from_its_parent():
    # No TensorFlow yet: the parent is watched before it loads.
    code = "import sys; sys.modules['tensorflow'] = None; import runpy; "
    path = str(Path(service_worker.__file__))
    run = f"runpy.run_path({path!r}, run_name='__main__')"
    command = [sys.executable, "-c", code + run, f"--parent={os.getpid()}"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes)
    process.stdin.close()
    assert process.wait(LIMIT_SECONDS) in (0, 1)


@pytest.fixture(scope="module")
def service():
    with Service(2) as service:
        yield service


def pair(x):
    return {"twice": 2 * x, "image": tf.cast(x, tf.uint8) * tf.ones((2, 3), tf.uint8)}


def varied(x):
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(x % 5), [x % 5])
    return tf.range(x % 7), (tf.strings.as_string(x), tf.cast(x, tf.bfloat16)), ragged


WORK = {
    "nothing": lambda share: share,
    "dense": lambda share: share.map(pair, num_parallel_calls=2),
    "varied": lambda share: share.map(varied),
    "pairs": lambda share: share.map(lambda x: (x, tf.as_string(x))),
}


def texts(dataset):
    """Returns each element as text, which compares any kind of part."""
    parts = (tf.nest.flatten(element, expand_composites=True) for element in dataset)
    return [str([np.array(p.numpy()).tolist() for p in part]) for part in parts]


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_elements_and_order_are_those_without_a_service(service, work):
    expected = work(numbers())
    dataset = service.distribute(numbers(), work)
    assert dataset.element_spec == expected.element_spec
    assert int(dataset.cardinality()) == 103
    orders = []
    for _ in range(2):
        found = within_limit(lambda: texts(dataset))
        # The seeded shuffle and `take` behind it: another 103 numbers each epoch.
        assert found == texts(expected)
        orders.append(found)
    assert orders[0] != orders[1]


def test_a_filter_on_the_workers_drops_no_more_and_no_less(service):
    def keep(share):
        # Everything that worker 1 has of one epoch, and nothing of worker 0's.
        return share.filter(lambda x: x % 2 == 1)

    ordered = service.distribute(tf.data.Dataset.range(50), keep)
    assert texts(ordered) == texts(keep(tf.data.Dataset.range(50)))
    mixed, expected = service.distribute(numbers(), keep), keep(numbers())
    assert int(mixed.cardinality()) == int(tf.data.UNKNOWN_CARDINALITY)
    for _ in range(2):
        assert sorted(texts(mixed)) == sorted(texts(expected))


@pytest.mark.parametrize("size", [0, 1, 2, 5], ids=str)
def test_a_few_elements_are_shared_too(service, size):
    dataset = service.distribute(numbers(size), lambda share: share)
    expected = numbers(size)
    for _ in range(2):
        assert within_limit(lambda: texts(dataset)) == texts(expected)


def test_packed_files_are_read_on_the_workers(service, tmp_path):
    lines = "".join(f'{n},"a\n{n}"\n' for n in range(50))
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(f"x,text\n{lines}".encode()))
    dataset = Pipeline.from_csv(path).build(service=service)
    found = [(int(one["x"]), one["text"].numpy()) for one in dataset]
    assert found == [(n, f"a\n{n}".encode()) for n in range(50)]


def test_an_epoch_left_early_is_followed_by_a_whole_one(service):
    dataset = service.distribute(tf.data.Dataset.range(5000), lambda share: share)
    assert texts(dataset.take(3)) == ["[0]", "[1]", "[2]"]
    assert within_limit(lambda: texts(dataset)) == [f"[{n}]" for n in range(5000)]


def test_fit_trains_on_each_element_once_an_epoch(service):
    seen = []
    dataset = service.distribute(tf.data.Dataset.range(20), WORK["dense"])
    dataset = dataset.map(lambda e: (tf.cast(e["twice"], tf.float32)[None], 1.0))
    dataset = Pipeline.from_dataset(dataset).shuffle(seed=1).batch(8).build()

    class Recorder(keras.Model):
        def __init__(self):
            super().__init__()
            self.total = self.add_weight(shape=(), initializer="zeros")

        def call(self, x):
            self.total.assign_add(tf.reduce_sum(x))
            return x * self.total * 0.0

    class Totals(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(float(self.model.total.value))

    model = Recorder()
    model.compile("sgd", "mse")
    fitting = {"epochs": 3, "verbose": 0, "callbacks": [Totals()]}
    within_limit(lambda: model.fit(dataset, **fitting))
    # 0 + 2 + ... + 38 in each epoch.
    assert seen == [380.0, 760.0, 1140.0]


def test_an_error_on_a_worker_arrives_with_its_text(service):
    def fail(x):
        check = tf.debugging.assert_less(x, tf.constant(30, tf.int64), "too many")
        with tf.control_dependencies([check]):
            return tf.identity(x)

    numbers = tf.data.Dataset.range(100)
    dataset = service.distribute(numbers, lambda share: share.map(fail))
    with pytest.raises(tf.errors.OpError, match="too many"):
        within_limit(lambda: texts(dataset))


def test_a_worker_that_runs_elsewhere_is_used_and_left_running(service):
    addresses = [worker.address for worker in service.workers]
    with Service.at(addresses) as elsewhere:
        dataset = elsewhere.distribute(numbers(), WORK["dense"])
        assert within_limit(lambda: texts(dataset)) == texts(numbers().map(pair))
    service.check()


def test_what_is_augmented_behind_the_workers_follows_its_ramp(service):
    def add(value, strength):
        return value + tf.cast(100 * strength, value.dtype)

    numbers = np.arange(24, dtype=np.float32)
    pipeline = Pipeline.from_arrays(numbers).map(lambda x: x).batch(8).prefetch()
    pipeline = pipeline.augment(add, ramp_epochs=2, seed=1)
    dataset = pipeline.build(service=service)
    found = [{float(x[0]) for x in dataset} for _ in range(3)]
    assert found == [{0, 8, 16}, {50, 58, 66}, {100, 108, 116}]


def test_a_killed_worker_ends_the_epoch_and_a_new_service_works(service):
    """The last test of the shared workers, both of which it ends."""
    before = set(threading.enumerate())
    with service:
        dataset = service.distribute(tf.data.Dataset.range(10**8), lambda share: share)

        def read():
            for number, _ in enumerate(dataset.batch(100)):
                if number == 50:
                    os.kill(service.workers[1].pid, signal.SIGKILL)
                    read.killed = time.monotonic()

        message = "Worker 1 of 2 (process "
        with pytest.raises(tf.errors.UnknownError, match=re.escape(message)) as caught:
            within_limit(read)
        assert "was ended by SIGKILL; expected it to serve until" in str(caught.value)
        assert time.monotonic() - read.killed < 10
        with pytest.raises(ServiceError, match="was ended by SIGKILL"):
            service.distribute(numbers(), lambda share: share)
        survivor = service.workers[0]
        with Service.at([survivor.address]) as new:
            dataset = new.distribute(numbers(), lambda share: share)
            assert within_limit(lambda: texts(dataset)) == texts(numbers())
        # As where its parent is killed, which tells it nothing else.
        survivor._process.stdin.close()
        survivor._process.wait(LIMIT_SECONDS)
    # Threads that waited for the dead worker are gone with the service.
    left = set(threading.enumerate()) - before
    assert "tfamp service reader" not in {thread.name for thread in left}


PROGRAM = """
import os, signal
import tensorflow as tf
from tfamp.data.service import Service
service = Service(1)
dataset = service.distribute(tf.data.Dataset.range(10**6), lambda share: share)
next(iter(dataset))
print(service.workers[0].pid, flush=True)
if {kill}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended; whoever adopted it has not asked yet.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " not in status.read_text()


@pytest.mark.whole("a worker's end with the pipe from its parent is tested above")
@pytest.mark.parametrize("kill", [False, True], ids=["ends", "is killed"])
def test_no_worker_outlives_a_program_that(kill):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(kill=kill)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr[-2000:]
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)
