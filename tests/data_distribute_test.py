"""What `Pipeline.build` gives loses and doubles nothing under `tf.distribute`."""

import collections
import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refusals
from tests.replicas import two_replicas
from tfamp.data import Pipeline
from tfamp.data.stages import batches, workers
from tfamp.data.stages.workers import num_workers

Policy = tf.data.experimental.AutoShardPolicy
NUM = 27
# Classes of unequal size: 0, 9 and 18 are of class 1, the others of class 0.
LABELS = (np.arange(NUM) % 9 == 0).astype(np.int64)
FEATURES = {"x": tf.io.FixedLenFeature([], tf.int64)}


def arrays():
    return Pipeline.from_arrays(np.arange(NUM), LABELS)


def write_records(folder, sizes=(5, 13, 9)):
    """Writes files of these sizes which together hold 0, 1, 2 and so on."""
    numbers = iter(range(sum(sizes)))
    for file, size in enumerate(sizes):
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for _ in range(size):
                value = tf.train.Int64List(value=[next(numbers)])
                feature = {"x": tf.train.Feature(int64_list=value)}
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())
    return folder


def from_records(folder):
    pipeline = Pipeline.from_tfrecord(
        str(write_records(folder) / "*.tfrecord"), features=FEATURES
    )
    return pipeline.map(lambda example: example["x"])


def from_csv(folder):
    for file, rows in enumerate((range(11), range(11, NUM))):
        text = "x,y\n" + "".join(f"{row},{row % 3}\n" for row in rows)
        (folder / f"{file}.csv").write_text(text)
    return Pipeline.from_csv(str(folder / "*.csv"), label="y")


def from_text(folder):
    (folder / "lines.txt").write_text("".join(f"{row}\n" for row in range(NUM)))
    return Pipeline.from_text(folder / "lines.txt").map(
        lambda line: tf.strings.to_number(line, tf.int64)
    )


def from_images(folder):
    """Images whose one gray value, times 5, is their number."""
    (folder / "one").mkdir()
    for number in range(NUM):
        png = tf.io.encode_png(np.full((4, 4, 1), number, np.uint8)).numpy()
        (folder / "one" / f"{number:02}.png").write_bytes(png)
    pipeline = Pipeline.from_images(folder).decode((4, 4), channels=1)
    return pipeline.map(lambda image, label: image[0, 0, 0])


def careful(pipeline):
    """Skips number 4, which cannot be worked on."""

    def refuse(x, y):
        four = tf.constant(4, x.dtype)
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, four)]):
            return tf.identity(x), y

    return pipeline.map(refuse).on_error("skip", max_fraction=0.5)


def sequences(num=NUM):
    lengths = 1 + np.arange(num) % 12
    given = tf.data.Dataset.from_tensor_slices((np.arange(num), lengths))
    return Pipeline.from_dataset(given.map(lambda x, n: tf.fill([n], x + 1)))


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


def inputs_of(batch):
    x = batch[0] if isinstance(batch, tuple) else batch
    return x["x"] if isinstance(x, dict) else x


def epoch_of(strategy, distributed):
    """Returns, step by step, the numbers that each replica got."""
    return [
        [np.ravel(part).tolist() for part in strategy.experimental_local_results(x)]
        for x in map(inputs_of, distributed)
    ]


def flat(steps):
    return [number for step in steps for part in step for number in part]


def sizes(steps):
    return [[len(part) for part in step] for step in steps]


KINDS = {
    "arrays": lambda folder: arrays(),
    "arrays, file cache": lambda folder: arrays().cache(folder / "cache"),
    "records": from_records,
    "records, memory cache": lambda folder: from_records(folder).cache("memory"),
    "records, file cache": lambda folder: from_records(folder).cache(folder / "c"),
    "csv": from_csv,
    "text": from_text,
    "images": from_images,
    "dataset": lambda folder: Pipeline.from_dataset(tf.data.Dataset.range(NUM)),
}


@pytest.mark.quick("arrays-True")
@pytest.mark.parametrize(
    "kind, is_shuffled",
    [("arrays", False), ("records", False), ("csv", False)]
    + [(kind, True) for kind in KINDS],
)
def test_replicas_share_every_batch_and_miss_no_element(
    strategy, tmp_path, kind, is_shuffled
):
    pipeline = KINDS[kind](tmp_path)
    if is_shuffled:
        pipeline = pipeline.shuffle(seed=1)
    dataset = pipeline.batch(8).build()
    # Workers divide elements, not files.
    policy = dataset.options().experimental_distribute.auto_shard_policy
    assert policy == Policy.DATA
    distributed = strategy.experimental_distribute_dataset(dataset)
    epochs = [epoch_of(strategy, distributed) for _ in range(2)]
    for steps in epochs:
        assert sizes(steps) == [[4, 4], [4, 4], [4, 4], [2, 1]]
        assert sorted(flat(steps)) == list(range(NUM))
    assert (flat(epochs[0]) == list(range(NUM))) is not is_shuffled
    assert (epochs[0] == epochs[1]) is not is_shuffled


@pytest.mark.parametrize("kind", ["arrays", "csv"])
def test_without_remainder_every_replica_gets_full_batches(strategy, tmp_path, kind):
    pipeline = KINDS[kind](tmp_path).shuffle(seed=1).batch(8, drop_remainder=True)
    distributed = strategy.experimental_distribute_dataset(pipeline.build())
    steps = epoch_of(strategy, distributed)
    assert sizes(steps) == [[4, 4]] * 3
    assert max(collections.Counter(flat(steps)).values()) == 1


def test_an_odd_batch_gives_the_first_replica_one_more(strategy):
    dataset = arrays().batch(7).build()
    steps = epoch_of(strategy, strategy.experimental_distribute_dataset(dataset))
    assert sizes(steps) == [[4, 3], [4, 3], [4, 3], [3, 3]]
    assert flat(steps) == list(range(NUM))


@pytest.mark.quick("filter")
@pytest.mark.parametrize(
    "choose, expected",
    [
        (lambda p: p.filter(lambda x, y: x % 3 > 0), [n for n in range(NUM) if n % 3]),
        (careful, [n for n in range(NUM) if n != 4]),
        (lambda p: p.weights(np.arange(NUM) % 2, num_examples=13, replacement=False),
         list(range(1, NUM, 2))),
    ],
    ids=["filter", "on_error", "weights"],
)  # fmt: skip
def test_what_is_left_out_is_left_out_once(strategy, choose, expected):
    dataset = choose(arrays()).shuffle(seed=1).batch(8).build()
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        assert sorted(flat(epoch_of(strategy, distributed))) == expected


def test_balance_and_subset_keep_their_counts(strategy):
    balanced = arrays().balance(seed=1).batch(8).build()
    steps = epoch_of(strategy, strategy.experimental_distribute_dataset(balanced))
    rare = sum(LABELS[number] for number in flat(steps))
    assert len(flat(steps)) == NUM
    assert rare in (13, 14)  # half of 27
    subset = arrays().subset(12, stratify="target", seed=3).batch(8)
    alone = [int(n) for x, _ in subset.build() for n in x]
    distributed = strategy.experimental_distribute_dataset(subset.build())
    assert flat(epoch_of(strategy, distributed)) == alone


def test_buckets_are_shared_between_replicas(strategy):
    dataset = sequences().bucket(6, boundaries=[8, 16]).shuffle(seed=1).build()
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        found = []
        for batch in distributed:
            parts = strategy.experimental_local_results(batch)
            assert {part.shape[1] for part in parts} <= {8, 16}
            found += [int(row[0]) - 1 for part in parts for row in part]
        assert sorted(found) == list(range(NUM))


@pytest.mark.quick("arrays")
@pytest.mark.parametrize("kind", ["arrays", "records, file cache"])
def test_in_one_process_no_policy_loses_anything(strategy, tmp_path, kind):
    dataset = KINDS[kind](tmp_path).shuffle(seed=1).batch(8).build()
    for policy in (Policy.AUTO, Policy.FILE, Policy.DATA, Policy.OFF):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        chosen = dataset.with_options(options)
        distributed = strategy.experimental_distribute_dataset(chosen)
        assert sorted(flat(epoch_of(strategy, distributed))) == list(range(NUM))


@pytest.mark.parametrize("policy", [Policy.OFF, Policy.FILE], ids=lambda p: p.name)
def test_a_policy_that_the_user_chose_for_a_dataset_stays(policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    given = tf.data.Dataset.range(4).with_options(options)
    built = Pipeline.from_dataset(given).batch(2).build()
    assert built.options().experimental_distribute.auto_shard_policy == policy


NEED_ALL = {
    "cache": lambda p, folder: p.cache(folder / "cache"),
    "subset": lambda p, folder: p.subset(2),
    "balance": lambda p, folder: p.balance(lambda x: x % 2),
    "shard": lambda p, folder: p.shard(2, 0),
}


@pytest.mark.parametrize("name", NEED_ALL)
def test_dividing_files_behind_what_needs_all_of_them_is_refused(tmp_path, name):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.FILE
    given = tf.data.Dataset.range(4).with_options(options)
    pipeline = NEED_ALL[name](Pipeline.from_dataset(given), tmp_path)
    message = (
        f"`dataset` has the option `auto_shard_policy` FILE, and `.{name}` came with "
        "it; expected elements of all files there. Leave the option as it was"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_the_context_may_divide_the_batches(strategy):
    def dataset_of(context):
        size = context.get_per_replica_batch_size(8)
        dataset = arrays().shuffle(seed=1).batch(size).build()
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    distributed = strategy.distribute_datasets_from_function(dataset_of)
    for _ in range(2):
        steps = epoch_of(strategy, distributed)
        assert sizes(steps) == [[4, 4], [4, 4], [4, 4], [3, 0]]
        assert sorted(flat(steps)) == list(range(NUM))


@pytest.mark.quick("1")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_fit_sees_each_example_once_however_many_replicas(strategy, num_replicas):
    x = np.arange(NUM, dtype=np.float32)[:, None]
    with strategy.scope() if num_replicas == 2 else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), metrics=["mae"], loss="mse")
        model.layers[0].kernel.assign([[2.0]])
    dataset = Pipeline.from_arrays(x, 0 * x).shuffle(seed=1).batch(8).build()
    history = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history
    # The mean of 0, 2, ..., 52; sums of such numbers are exact in float32.
    assert history["mae"] == [26.0, 26.0]


@pytest.mark.quick("arrays-1", "arrays-4")
@pytest.mark.parametrize(
    "kind, num_shards",
    [("arrays", 1), ("arrays", 4), ("records", 2), ("csv", 2), ("images", 2)],
)
def test_shards_are_disjoint_and_complete(tmp_path, kind, num_shards):
    pipeline = KINDS[kind](tmp_path)
    found = []
    for index in range(num_shards):
        # No seed, so each worker has an order of its own.
        dataset = pipeline.shard(num_shards, index).shuffle().batch(4).build()
        own = [int(n) for batch in dataset for n in np.ravel(inputs_of(batch))]
        assert sorted(own) == list(range(index, NUM, num_shards))
        assert int(dataset.cardinality()) == -(-len(own) // 4)
        found += own
        policy = dataset.options().experimental_distribute.auto_shard_policy
        assert policy == Policy.OFF
    assert sorted(found) == list(range(NUM))


def test_shards_of_large_arrays_are_shuffled_by_position(monkeypatch):
    monkeypatch.setattr(batches, "SHUFFLE_BUFFER_BYTES", 1)
    pipeline = arrays().shard(2, 1).shuffle(seed=1).batch(4)
    assert "gather" in pipeline.describe()
    assert sorted(int(n) for x, _ in pipeline.build() for n in x) == list(
        range(1, NUM, 2)
    )


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_subset_is_drawn_before_it_is_divided(kind):
    pipeline = KINDS[kind](None).subset(9, seed=3)
    whole = [int(inputs_of(x)) for x in pipeline.build()]
    parts = [
        [int(inputs_of(x)) for x in pipeline.shard(2, index).build()]
        for index in range(2)
    ]
    assert parts == [whole[0::2], whole[1::2]]


@pytest.mark.quick("stream")
@pytest.mark.parametrize("is_stream", [False, True], ids=["arrays", "stream"])
def test_a_shard_names_what_it_skips_by_its_place(is_stream):
    pipeline = arrays()
    if is_stream:
        pipeline = Pipeline.from_dataset(arrays().build())
    pipeline = careful(pipeline.shard(2, 0))
    found = [int(x) for x, _ in pipeline.build()]
    assert found == [n for n in range(0, NUM, 2) if n != 4]
    (skipped,) = pipeline.skipped
    place = "element 2 of those that reach `.map`" if is_stream else "element 4"
    assert skipped.where == place


def test_shards_keep_their_caches_beside_each_other(tmp_path):
    pipeline = KINDS["dataset"](None).cache(tmp_path / "cache")
    for _ in range(2):
        for index in range(2):
            pipeline.shard(2, index).build()
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(folders) == 2


def test_the_table_says_which_part_it_is():
    told = " ".join(arrays().shard(2, 1).describe().split())
    assert "shard part 1 of 2" in told
    assert "of 27, before any is read" in told
    told = " ".join(KINDS["dataset"](None).shard(2, 1).describe().split())
    assert "tf.distribute divides no further" in told


WRONG_SHARDS = {
    "beyond": ((2, 2), "`index` is 2 with `num_shards` 2; expected one from 0"),
    "negative": ((2, -1), "`index` is -1"),
    "none": ((0, 0), "`num_shards` is 0"),
    "no integer": ((2, 0.5), "`index` is 0.5", TypeError),
}
test_a_wrong_shard_is_refused = refusals(
    WRONG_SHARDS, lambda arguments: arrays().shard(*arguments)
)


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_an_empty_shard_is_refused(kind):
    pipeline = KINDS[kind](None).shard(40, 30)
    message = (
        "`.shard(40, 30)` of 27 elements is empty for a worker; expected an element for"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()


@pytest.mark.quick("shuffle")
@pytest.mark.parametrize(
    "stage, name",
    [
        (lambda p: p.shuffle(), "shuffle"),
        (lambda p: p.balance(lambda x, y: y).shuffle(seed=1), "balance"),
        (lambda p: p.cache("memory").map(lambda x, y: (x, y)).balance(), "balance"),
        (lambda p: p.weights(np.ones(NUM)), "weights"),
    ],
    ids=["shuffle", "balance by position", "balance on a stream", "weights"],
)
def test_several_workers_need_one_order(monkeypatch, stage, name):
    pipeline = stage(arrays()).batch(8)
    pipeline.build()
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    message = (
        f"`.{name}` has no seed, and 2 worker processes train together; expected one "
        "order in all of them, since each takes its share by position: some elements "
        "would come twice, others never. Pass the same `seed=` everywhere"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    pipeline.describe()


def test_several_workers_need_one_order_of_a_given_dataset(monkeypatch):
    seeded, loose = (arrays().build().shuffle(8, seed=seed) for seed in (1, None))
    Pipeline.from_dataset(loose).build()
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    Pipeline.from_dataset(seeded).build()
    with pytest.raises(ValueError, match="a shuffle without a seed, and 2 work"):
        Pipeline.from_dataset(loose).build()


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda: arrays().batch(8),
        lambda: arrays().shuffle(seed=1).batch(8),
        lambda: arrays().balance(seed=1).shuffle(seed=1),
        lambda: arrays().weights(np.ones(NUM), seed=1).shuffle(seed=0),
        lambda: arrays().shard(2, 0).balance().shuffle().batch(8),
    ],
    ids=["in order", "seed", "balance", "weights", "shard"],
)
def test_several_workers_take_what_has_one_order_or_is_divided(monkeypatch, pipeline):
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    pipeline().build()


def test_a_part_has_no_length_that_fit_would_take_for_its_steps(monkeypatch):
    part, whole = arrays().shard(2, 0).batch(7), arrays().batch(7)
    assert int(part.build().cardinality()) == 2
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    dataset = part.build()
    assert int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert [len(y) for _, y in dataset] == [7, 7]
    assert int(whole.build().cardinality()) == 4


def test_a_dataset_that_is_divided_already_needs_no_seed(monkeypatch):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.OFF
    given = tf.data.Dataset.range(8).shard(2, 0).with_options(options)
    monkeypatch.setattr(workers, "num_workers", lambda: 2)
    built = Pipeline.from_dataset(given).shuffle().build()
    assert sorted(int(x) for x in built) == [0, 2, 4, 6]


def task(job, number=0, device="CPU:0"):
    return f"/job:{job}/replica:0/task:{number}/device:{device}"


GPUS = [task("worker", n, f"GPU:{gpu}") for n in range(3) for gpu in range(2)]
TASKS = {
    "this process": (None, 1),
    "devices": (["/device:CPU:0", "/device:CPU:1"], 1),
    "localhost": ([task("localhost", device="GPU:0")], 1),
    "one": ([task("worker")], 1),
    "gpus": (GPUS, 3),
    "chief": ([task("chief"), task("worker")], 2),
    "ps": ([task("ps"), task("worker"), task("worker", 1)], 1),
    "coordinator": ([task("coordinator"), task("worker", device="TPU:0")], 1),
}


@pytest.mark.parametrize("names, expected", TASKS.values(), ids=TASKS)
def test_workers_are_counted_by_their_tasks(names, expected):
    assert num_workers(names) == expected
