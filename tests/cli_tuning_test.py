"""`tfamp measure` and `tfamp tune`: what they print, write, and refuse beforehand."""

import re
import sys

import keras
import pytest

import tfamp
from tests.written_modules import written
from tfamp.cli.main import main
from tfamp.tuning import judges

pytestmark = pytest.mark.filterwarnings(
    "ignore:'mixed_float16' will be slow", "ignore:overflow encountered in cast"
)
MODULE = """
    import keras
    import numpy as np
    import tensorflow as tf

    X = np.random.default_rng(0).normal(size=(1024, 8)).astype("float32")
    Y = (X[:, :2].sum(axis=1) > 0).astype("int32")
    SEEDS = []

    @keras.saving.register_keras_serializable("cli_tuning_test")
    class Squares(keras.layers.Layer):
        def call(self, x):
            return tf.square(x * 1e4) / 1e8 + x

    def alone(seed=1):
        SEEDS.append(seed)
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, "relu", name="hidden"),
             Squares(name="squares"), keras.layers.Dense(2, name="head")], name="tiny")
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def other():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    def data():
        return X, Y

    def build(seed=1):
        return alone(seed), data()

    def trained():
        model = alone()
        model.fit(X, Y, batch_size=256, verbose=0)
        return model, data(), data()

    def empty():
        return alone(), (X[:0], Y[:0])

    def hits(y, outputs):
        return tf.cast(tf.equal(tf.argmax(outputs, -1), tf.cast(y, "int64")), "float32")
"""
ALL_OF = ["--trained", "--metric=accuracy", "--tolerance=0.05", "--batch_size=128"]


module = written("tunable", MODULE)


def measured(*argv):
    """Returns what `tfamp measure` wrote of float32, having ended well."""
    given = ["--policies=float32", "--nojit_compile", "--json=found.json"]
    assert main(["measure", *argv, *given]) == 0
    return tfamp.Measurement.from_json("found.json")


def test_measure_prints_the_table(capsys):
    found = measured("tunable:build")
    assert capsys.readouterr().out == f"{found}\n"
    assert (found.model, found.best.name) == ("tiny", "float32")
    assert keras.config.dtype_policy().name == "float32"


def test_tune_writes_a_plan_that_enable_takes(module, capsys):
    argv = ["tune", "tunable:trained", "--policy=mixed_float16", *ALL_OF]
    assert main([*argv, "--json=found.json"]) == 0
    out = capsys.readouterr().out
    plan = tfamp.PrecisionPlan.from_json("plan.json")
    assert tfamp.PrecisionPlan.from_json("found.json") == plan
    assert out.startswith(f"{plan.table()}\nmixed_float16: worse by ")
    assert re.search(
        r"\naccuracy by outputs of the trained .*: \d+ evaluations, .*\.\n", out
    )
    assert out.endswith(
        "Plan: plan.json; train under it with `tfamp.enable(policy='plan.json')`.\n"
    )
    assert plan.layers["squares"] == "float32"
    assert plan.layers["hidden"] == "float16"
    assert keras.config.dtype_policy().name == "float32"
    # Other commands build under it, and only what it was made for.
    how = ["assignment", "tunable:alone", "--policy=plan.json+xla"]
    assert main([*how, "--json=found.json"]) == 0
    found = tfamp.Assignment.from_json("found.json")
    assert found["squares"].compute_dtype == "float32"
    assert found["hidden"].compute_dtype == "float16"
    how[1] = "tunable:other"
    assert main(how) == 1
    assert "The plan was made for another model" in capsys.readouterr().err


@pytest.mark.slow
def test_tune_goes_on_from_a_plan_and_judges_short_trainings(module, capsys):
    given = ["--tolerance=0.1", "--batch_size=128", "--seeds=2", "--num_steps=4"]
    given += ["--data=tunable:data", "--validation=tunable:data"]
    argv = ["tune", "tunable:alone", *given, "--metric=tunable:hits"]
    assert main([*argv, "--policy=mixed_bfloat16", "--out=first.json"]) == 0
    assert "hits by 2 short trainings of 4 steps: " in capsys.readouterr().out
    # Each training has a seed of its own, the same under each plan.
    seeds = sys.modules["tunable"].SEEDS[2:]
    assert len(set(seeds)) == 4
    argv = [*argv, "--policy=first.json", "--out=second.json"]
    assert main(argv) == 0
    plan = tfamp.PrecisionPlan.from_json("second.json")
    assert plan.policy == "mixed_bfloat16"


def test_a_search_that_is_stopped_says_so_or_gives_the_plan_so_far(
    module, capsys, monkeypatch
):
    argv = ["tune", "tunable:trained", "--policy=mixed_float16", *ALL_OF]
    judge = judges.FixedWeights.worsening

    def stopped_at(number):
        def stopped(self, plan, half):
            if half == number:
                raise KeyboardInterrupt
            return judge(self, plan, half)

        return stopped

    monkeypatch.setattr(judges.FixedWeights, "worsening", stopped_at(0))
    assert main(argv) == 130
    assert "stopped before a plan was found" in capsys.readouterr().err
    assert not (module / "plan.json").exists()
    monkeypatch.setattr(judges.FixedWeights, "worsening", stopped_at(1))
    assert main(argv) == 0
    plan = tfamp.PrecisionPlan.from_json(module / "plan.json")
    assert "interrupted before it was judged" in plan.evidence["tuning"]["reason"]


# Command line -> status and message.
FAILURES = {
    "tune trained --out=no/plan.json": (
        *(2, "`--out` is 'no/plan.json', but there is no folder 'no'; expected a"),
    ),
    "tune alone": (1, "'tunable:alone' returned <Sequential name=tiny, built=True>;"),
    "tune alone --data=tunable:dat": (1, "has no function 'dat'. Did you mean 'data'?"),
    "tune empty --policy=mixed_bfloat16": (
        1,
        "holds no batches; expected at least one.",
    ),
    "tune trained --policy=no.json": (
        *(
            2,
            "`--policy` is 'no.json'; expected the file of a plan, and there is none.",
        ),
    ),
    "tune trained --policy=float32": (
        *(2, "Unknown `--policy` 'float32'; expected 'auto', 'mixed_float16' or"),
    ),
    "tune trained --policy=mixed_float16 --trained --metric=acuracy": (1, "acuracy"),
    "tune trained --policy=mixed_float16 --trained --metric=acc --tolerance=1e-5": (
        *(1, "`tolerance` 1e-05 is below what 512 examples in each half can show;"),
    ),
    "tune trained --max_evaluations=1": (2, "max_evaluations"),
    "lint build --policy=no.json+xla": (
        *(2, "`--policy` is 'no.json+xla'; expected the file of a plan, and there is"),
    ),
    "lint build --policy=no.json+no_rules": (2, "a plan says of every layer what it"),
    "measure alone": (1, "expected (model, train) or (model, train, validation)."),
    "measure empty": (1, "holds no batches; expected at least one."),
    "measure build --budget_seconds=0": (1, "`budget_seconds`"),
    "measure build --policies=fp16": (2, "Unknown `--policies` 'fp16'; expected"),
}


@pytest.mark.quick(
    "tune trained --policy=mixed_float16 --trained --metric=acc --tolerance=1e-5"
)
@pytest.mark.parametrize("line", FAILURES)
def test_failures_end_before_work_is_spent(module, capsys, line):
    status, message = FAILURES[line]
    name, target, *flags = line.split()
    assert main([name, f"tunable:{target}", *flags]) == status
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"tfamp {name}: ")) == ("", True)
    assert message in err
    assert not (module / "plan.json").exists()


@pytest.mark.slow
def test_auto_is_what_suits_the_devices(monkeypatch):
    from tfamp.machine import devices
    from tfamp.machine.speeds import Recommendation

    for policy in ("float32", "mixed_bfloat16"):  # for devices elsewhere, if float32
        said = Recommendation(policy, "As it is.")
        monkeypatch.setattr(devices, "recommend", lambda found, said=said, **_: said)
        assert main(["tune", "tunable:trained", *ALL_OF]) == 0
        plan = tfamp.PrecisionPlan.from_json("plan.json")
        assert plan.policy == "mixed_bfloat16"
