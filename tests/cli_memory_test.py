"""`tfamp memory`: estimates, the batch that fits, trials, statuses, what is refused."""

import inspect
import json
import re
import sys

import keras
import pytest

import tfamp
from tests.written_modules import written
from tfamp.cli.main import main
from tfamp.machine.limits import MemoryLimit
from tfamp.memory.batch_search.records import BatchSearch, Trial
from tfamp.memory.estimates import MemoryEstimates

# Bytes of the two layers (16 * 8 + 8 + 8 * 4 + 4 float32) and of the loss's mean (2).
PARAMETERS = 4 * (172 + 2)
# Of an example: 16 inputs and 4 targets.
EXAMPLE = 4 * (16 + 4)

MODULE = """
    import keras
    import tensorflow as tf

    def alone():
        found = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(8, name="hidden"),
             keras.layers.Dense(4, name="head")], name="tiny")
        found.compile("sgd", "mse")
        return found

    def build():
        data = tf.data.Dataset.range(96).map(lambda _: (tf.zeros(16), tf.zeros(4)))
        return alone(), data.batch(48)

    def build_arrays(seed):
        assert seed == 0
        return alone(), (tf.zeros((200, 16)), tf.zeros((200, 4))), None

    def open_shape():
        found = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(4)])
        found.compile("sgd", "mse")
        return found

    def open_shape_with_data():
        return open_shape(), (tf.zeros((64, 5, 4)), tf.zeros((64, 5, 4)))

    def uncompiled():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="raw")

    def four():
        return alone(), 1, 2, 3
"""


module = written("measurable", MODULE)


def estimated(target, *argv):
    """Returns what the command wrote as JSON, having ended well."""
    assert main(["memory", f"measurable:{target}", *argv, "--json=found.json"]) == 0
    return MemoryEstimates.from_json("found.json")


def test_it_prints_the_table_of_the_datas_batches(capsys):
    found = estimated("build", "--policy=float32")
    assert capsys.readouterr().out == f"{found.table()}\n"
    (one,) = found
    assert (one.model, one.policy, one.batch_size) == ("tiny", "float32", 48)
    assert one.training
    assert one.by_kind["parameters"] == PARAMETERS
    assert one.by_kind["inputs"] == 48 * EXAMPLE


@pytest.mark.parametrize(
    "target, flag, num_bytes",
    [
        ("alone", "", 32 * EXAMPLE),
        ("build_arrays", "", 32 * EXAMPLE),
        ("open_shape_with_data", "--batch_size=2", 2 * 2 * 5 * 4 * 4),
        ("open_shape", "--sequence_length=5", 32 * 5 * (4 + 4) * 4),
    ],
)
def test_sizes_that_nobody_tells_are_those_of_fit_and_of_the_data(
    target, flag, num_bytes
):
    (one,) = estimated(target, "--policy=float32", *filter(None, [flag]))
    assert one.by_kind["inputs"] == num_bytes


@pytest.mark.slow
def test_it_takes_each_policy_with_each_size():
    (one,) = estimated("alone")  # "auto" is told by what it came to
    assert one.policy in ("float32", "mixed_bfloat16", "mixed_float16")
    policies = ["float32", "mixed_bfloat16+no_rules", "float32+xla"]
    found = estimated("alone", "--policy", ",".join(policies), "--batch-size=8,24")
    assert [(each.policy, each.batch_size) for each in found] == [
        (policy, size) for policy in policies for size in (8, 24)
    ]
    noted = [any("XLA" in note for note in each.notes) for each in found]
    assert noted == [False] * 4 + [True] * 2
    # The products of mixed_bfloat16 read casts, whatever it is called.
    assert found[1].by_kind != found[3].by_kind
    assert keras.config.dtype_policy().name == "float32"


def test_another_optimizer_and_inference_reach_the_estimate():
    (adam,) = estimated("build", "--policy=float32", "--optimizer=adam")
    # Two moments of each weight, the counter (int64) and the learning rate.
    assert adam.by_kind["optimizer slots"] == 2 * 4 * 172 + 8 + 4
    (one,) = estimated("build", "--policy=float32", "--notraining")
    assert not one.training
    assert "optimizer slots" not in one.by_kind
    assert one.by_kind["inputs"] == 48 * 16 * 4


def test_a_limit_is_answered_by_the_largest_batch_of_each_policy(capsys):
    limit = 1_000_000
    policies = ("float32", "mixed_bfloat16")
    found = estimated(
        "build",
        f"--policy={','.join(policies)}",
        "--batch_size=64,8",
        "--max_memory=1MB",
    )
    last = capsys.readouterr().out.splitlines()[-1]
    words = re.fullmatch(
        r"Largest batch size that fits in 977 KiB: ([\d,]+) \(float32\), ([\d,]+) "
        r"\(mixed_bfloat16\)\.",
        last,
    )
    for policy, word in zip(policies, words.groups(), strict=True):
        size = int(word.replace(",", ""))
        one = next(e for e in found if e.policy == policy and e.batch_size == 64)
        assert size % 8 == 0
        assert one.bytes_at(size) <= limit < one.bytes_at(size + 8)


@pytest.mark.quick("thousands")
@pytest.mark.parametrize(
    "limit, expected",
    [
        (f"{PARAMETERS + 12 + EXAMPLE}", r"none, 1 takes [\d,.]+ (bytes|KiB)"),
        ("2KiB", r"[1-7]"),
        ("2KB", r"[1-7]"),
    ],
    ids=["no example", "a few", "thousands"],
)
def test_a_limit_may_hold_less_than_eight_examples_or_none(capsys, limit, expected):
    limits = (f"--max_memory={limit}",)
    estimated("alone", "--policy=float32", *limits, "--batch_size=8")
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"Largest batch .*: {expected} \(float32\)\.", last), last


@pytest.mark.parametrize(
    "curve, expected",
    [
        # 100 bytes and 10 an example: 2,000 hold 190, or 184 as a multiple of 8.
        ([[64, 740], [128, 1380]], "184"),
        ([[64, 100], [128, 100]], "any"),
    ],
    ids=["grows", "does not grow"],
)
def test_what_was_traced_for_the_larger_size_tells(
    monkeypatch, capsys, curve, expected
):
    (one,) = estimated("alone", "--policy=float32")
    large = {"batch_size": 64, "curve": curve}
    small = {"batch_size": 8, "curve": [[8, 100], [16, 200]]}
    made_up = MemoryEstimates.from_dict(
        {"estimates": [one.to_dict() | large, one.to_dict() | small]}
    )
    monkeypatch.setattr(tfamp, "estimate_memory", lambda *_, **__: made_up)
    argv = ["memory", "measurable:alone", "--policy=float32", "--batch_size=64,8"]
    assert main([*argv, "--max_memory=2000"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Largest batch size that fits in 2.0 KiB: {expected} (float32)."


def test_a_limit_is_of_the_whole_process_where_it_is_measured(monkeypatch, capsys):
    (one,) = estimated("alone", "--policy=float32")
    # 100 bytes and 10 an example: 2,000 hold 190, or 184 as a multiple of 8.
    line = {"source": "measured", "curve": [[64, 740], [128, 1380]]}
    made_up = MemoryEstimates.from_dict({"estimates": [one.to_dict() | line]})
    given = []

    def estimate(*_, **options):
        given.append(options["measure"])
        return made_up

    monkeypatch.setattr(tfamp, "estimate_memory", estimate)
    argv = ["memory", "measurable:alone", "--policy=float32", "--max_memory=2000"]
    assert main([*argv, "--measure"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("Largest batch size whose process fits in 2.0 KiB: 184 (float32).")
    assert given == [True]


def test_a_plot_is_drawn(module):
    pytest.importorskip("matplotlib")
    estimated("alone", "--policy=float32", "--plot=memory.png")
    assert (module / "memory.png").read_bytes().startswith(b"\x89PNG")


# find_batch_size


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(tfamp.find_batch_size).parameters.items()
    if name not in ("build_model", "data", "verbose", "on_trial")
}


@pytest.fixture
def searched(monkeypatch):
    """What the search was called with; it finds 64 of two sizes."""
    calls = []
    found = BatchSearch(
        **{"model": "tiny", "policy": "float32", "batch_size": 64},
        accumulation_steps=1,
        trials=(Trial(32, "fits", 100.0, 0.3, 1.0, 10), Trial(64, "fits", 190.0)),
        stopped_by="knee",
        largest_that_fits=None,
        limit=MemoryLimit(10**9, "max_memory_bytes"),
        **{"margin": 0.1, "min_gain": 0.05},
    )

    def find(*args, **kwargs):
        calls.append((args, kwargs))
        return found

    monkeypatch.setattr(tfamp, "find_batch_size", find)
    return calls, found


def test_find_prints_what_the_trials_come_to(searched, capsys):
    calls, found = searched
    argv = ["find_batch_size", "measurable:build", "--policy=float32+xla"]
    flags = ["--max_memory=1GB", "--start=4", "--min-gain=0.1", "--json=found.json"]
    assert main([*argv, *flags]) == 0
    kwargs = DEFAULTS | {"policy": "float32+xla", "max_memory_bytes": 10**9}
    kwargs |= {"start": 4, "min_gain": 0.1}
    assert calls == [(("measurable:build",), kwargs)]
    assert capsys.readouterr().out == f"{found}\n"
    with open("found.json") as file:
        assert json.load(file)["batch_size"] == 64
    assert "measurable" not in sys.modules  # trials build it, this process does not


def test_find_without_a_limit_leaves_it_to_the_machine(searched):
    calls, _ = searched
    assert main(["find_batch_size", "measurable:build"]) == 0
    assert calls[0][1] == DEFAULTS | {"policy": "auto", "max_memory_bytes": None}


@pytest.mark.slow("the tests above hold the call, batch_search_trials_test the trials")
def test_find_makes_trials_of_what_the_function_builds(capsys):
    pytest.importorskip("cloudpickle")
    argv = ["find_batch_size", "measurable:build", "--policy=float32"]
    assert main([*argv, "--max_memory=10MB"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tfamp find_batch_size: ")
    # No process with TensorFlow in it holds 9 MB.
    assert "of 'measurable:build' does not fit" in printed.err
    assert "8.6 MiB (max_memory_bytes, less the margin)" in printed.err


# Failures

FAILURES = {
    "four": (["measurable:four"], 1, "expected a model, (model, train) or"),
    "not compiled": (["measurable:uncompiled"], 1, "Model 'raw' is not compiled;"),
    "open shape": (["measurable:open_shape"], 1, "`--sequence_length=128` to `tfamp"),
    "length": (["a:b", "--sequence_length=0"], 2, "sequence_length"),
    "size": (["a:b", "--batch_size=8,0"], 2, "`--batch_size` has '0'; expected whole"),
    "max_memory": (
        ["a:b", "--max_memory=16GO"],
        2,
        "`--max_memory` is '16GO'; expected a number of",
    ),
    "no optimizer": (
        ["a:b", "--notraining", "--optimizer=adam"],
        2,
        "`--optimizer` came with `--notraining`; expected one of them",
    ),
}


@pytest.mark.parametrize("argv, status, message", FAILURES.values(), ids=FAILURES)
def test_failures_end_with_a_status_and_a_sentence(capsys, argv, status, message):
    if not any(word.startswith("--policy") for word in argv):
        argv = [*argv, "--policy=float32"]
    assert main(["memory", *argv]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("tfamp memory: ")
    assert printed.err.count("\n") == 1
