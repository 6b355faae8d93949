"""What `--max_memory` does in recipes: batches that fit, updates, what is refused."""

import re
import types

import keras
import pytest

import tfamp
from tests.recipe_modules import TRAINING, load, parsed, run, shared
from tfamp.records import units

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")


@pytest.fixture(scope="module")
def fitting():
    """The module under test, where recipes find it and one another."""
    with shared("fitting_in_memory") as (module,):
        yield module


def settings(max_memory, batch_size=256, accumulation_steps=1):
    return types.SimpleNamespace(
        max_memory=max_memory,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
    )


def build(given):
    """Returns a model of few weights and large activations, without data."""
    from fitting_in_memory import accumulating

    layers = [keras.layers.Dense(4096), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = keras.optimizers.SGD()
    model.compile(accumulating(optimizer, given.accumulation_steps), "mse")
    return model, None


def predicted(given):
    return tfamp.estimate_memory(build(given)[0], given.batch_size).peak_bytes


# Arithmetic


@pytest.mark.parametrize(
    "largest, effective, expected",
    [
        (64, 128, (64, 2)),
        (40, 64, (32, 2)),  # 40 leaves a rest
        (8, 64, (8, 8)),
        (96, 100, (56, 2)),  # no multiple of 8 goes into 100; 2 * 56 is next
        (8, 12, (8, 2)),
        (24, 100, (24, 5)),
    ],
)
def test_an_update_is_split_into_the_largest_batches(
    fitting, largest, effective, expected
):
    assert fitting.split(largest, effective) == expected


@pytest.mark.parametrize("effective", [9, 30, 64, 100, 513])
@pytest.mark.parametrize("largest", [8, 24, 96])
def test_a_split_fits_and_loses_no_example(fitting, largest, effective):
    size, steps = fitting.split(largest, effective)
    assert size % 8 == 0
    assert size <= largest
    assert effective <= size * steps < effective + 8 * steps


@pytest.mark.parametrize(
    "text", ["1", "12B", "500 MB", "5kB", "7KiB", "2GB", "3mib", "1.5GiB"]
)
def test_bytes_are_read_as_on_the_command_line(fitting, text):
    assert fitting.num_bytes(text) == units.parse_bytes("limit", text)


@pytest.mark.parametrize("text", ["", "0", "0.5", "-2GiB", "2 gigabytes", "GiB"])
def test_what_is_no_number_of_bytes_is_refused(fitting, text):
    message = (
        f"`--max_memory` is {text!r}; expected a number of bytes, alone or with a unit "
        "from kB to GB or from KiB to GiB. Write for example `--max_memory=2GiB`."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        fitting.fitted(settings(text), build)


# The batch


def test_without_the_flag_nothing_is_built(fitting):
    given = settings(None)
    assert fitting.fitted(given, build=None) == (given, {})


def test_a_step_that_fits_stays_as_it_is(fitting, capsys):
    given = settings("1GiB")
    found, memory = fitting.fitted(given, build)
    assert found == given
    assert memory == {
        "predicted_peak_bytes": predicted(given),
        "batch_size": 256,
        "accumulation_steps": 1,
    }
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("steps", [1, 3], ids=["one batch", "several batches"])
def test_a_step_that_does_not_fit_is_made_of_batches_that_do(fitting, capsys, steps):
    # 256 examples hold 4096 float32 each, 4 MiB, and as many gradients.
    limit = 2_000_000
    found, memory = fitting.fitted(settings(str(limit), 256, steps), build)
    size, number = memory["batch_size"], memory["accumulation_steps"]
    assert (found.batch_size, found.accumulation_steps) == (size, number)
    assert size % 8 == 0
    assert size * number == 256 * steps
    assert memory["predicted_peak_bytes"] == predicted(found) <= limit
    # The next size that goes into an update evenly is too large.
    larger = next(n for n in range(size + 8, 257, 8) if 256 * steps % n == 0)
    assert predicted(settings(None, larger, 256 * steps // larger)) > limit
    (line,) = capsys.readouterr().out.splitlines()
    before = predicted(settings(None, 256, steps))
    assert line == (
        f"--max_memory=2000000: a step was predicted to take {before:,} bytes, and "
        f"takes {predicted(found):,} in batches of {size}; {number} of them make an "
        f"update of {256 * steps} examples (before: {256 * steps})."
    )


def test_a_choice_far_from_what_was_traced_is_traced_again(fitting):
    """Whatever the curve says of small batches, a step above the limit is not taken."""
    traced = []

    class MadeUp:
        """Takes 10 bytes an example and says 1 of all others."""

        def __init__(self, size):
            self.size, self.peak_bytes = size, 10 * size
            traced.append(size)

        def largest_batch(self, limit, *, multiple_of, resident):
            assert multiple_of == 8
            return 8 * max(1, min(limit, self.size - 8) // 8)

    original = fitting._estimate
    fitting._estimate = lambda build, given: MadeUp(given.batch_size)
    try:
        found, memory = fitting.fitted(settings("160", 64), build)
    finally:
        fitting._estimate = original
    assert (found.batch_size, found.accumulation_steps) == (16, 4)
    assert memory["predicted_peak_bytes"] == 160
    assert traced == [64, 32, 16]


def test_a_limit_that_holds_no_batch_names_the_way_out(fitting):
    with pytest.raises(ValueError) as caught:
        fitting.fitted(settings("64KiB"), build)
    message = str(caught.value)
    assert message.startswith(
        "`--max_memory` is '64KiB', too little for a batch of 8: `limit_bytes` is 64.0 "
        "KiB, and a batch of 8 takes "
    )
    assert "Use `tfamp.remat`" in message


# The updates


@pytest.mark.parametrize(
    "policy, scale", [("float32", 1.0), ("mixed_float16", 2.0**15)]
)
@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
def test_only_float16_gets_a_loss_scale(fitting, policy, scale):
    adam = keras.optimizers.Adam()
    assert fitting.accumulating(adam, 1) is adam
    with tfamp.scope(policy):
        optimizer = fitting.accumulating(adam, 4)
    assert optimizer.inner_optimizer is adam
    assert (optimizer.accumulation_steps, optimizer.scale) == (4, scale)
    optimizer.apply([keras.ops.convert_to_tensor(float("inf"))], [keras.Variable(1.0)])
    # A scale that moves backs off by half.
    assert optimizer.scale == (1.0 if policy == "float32" else 2.0**14)


ACCUMULATING = ("--smoke", "--batch_size=8", "--accumulation_steps=2")


@pytest.mark.parametrize("recipe", TRAINING)
def test_every_recipe_adds_batches_up(fitting, recipe):
    module, flags = parsed(recipe, *ACCUMULATING)
    model, data, _ = module.build(flags)
    assert model.optimizer.accumulation_steps == 2
    model.fit(data, epochs=1, verbose=0)
    assert model.optimizer.applied_steps == 1  # `--smoke` trains two batches


@pytest.mark.parametrize("recipe", ["train_digits.py", "train_text.py"])
def test_the_learning_rate_falls_over_updates(fitting, recipe):
    module, flags = parsed(recipe, *ACCUMULATING)
    model, _, _ = module.build(flags, epochs=5)
    schedule = model.optimizer.inner_optimizer.get_config()["learning_rate"]["config"]
    assert schedule["decay_steps"] == 5
    assert schedule["warmup_steps"] == (recipe == "train_text.py")


# Whole recipes


@pytest.mark.parametrize("recipe", TRAINING)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--max_memory=2GiB", "--compare=2"],
            "`--max_memory` came with `--compare`; expected one of them, as each",
        ),
        (["--accumulation_steps=0"], "flag --accumulation_steps=0"),
    ],
    ids=["comparison", "no steps"],
)
def test_flags_are_refused_in_one_line(fitting, capsys, recipe, arguments, message):
    assert load(recipe).main([recipe, *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# Recipe -> a batch that passes the limit, and the limit.
TOO_LARGE = {
    "train_digits.py": (512, 20_000_000),
    "train_tabular.py": (256, 140_000),
}


@pytest.mark.parametrize("recipe", TOO_LARGE)
@pytest.mark.anchors("train_tabular.py")
def test_smoke_trains_in_batches_that_fit(recipe):
    size, limit = TOO_LARGE[recipe]
    finished = run(
        *(recipe, "--smoke", "--policy=float32"),
        *(f"--batch_size={size}", f"--max_memory={limit}"),
    )
    record = finished.record
    assert finished.stdout.count(f"--max_memory={limit}: a step was predicted") == 1
    assert record["finite"] is True
    assert record["predicted_peak_bytes"] <= limit
    assert record["accumulation_steps"] > 1
    assert record["batch_size"] * record["accumulation_steps"] == size


def test_smoke_ends_with_a_message_where_nothing_fits():
    finished = run(
        "train_tabular.py", "--smoke", "--policy=float32", "--max_memory=9KiB"
    )
    assert finished.returncode == 1
    assert "`--max_memory` is '9KiB', too little for a batch of 8" in finished.stderr
    assert "tfamp.remat" in finished.stderr
