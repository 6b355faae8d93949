"""One `enable` with rules for several models, whichever of them comes first."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from tests.styles import assembled

NOISE = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
IMAGES = np.random.default_rng(1).normal(size=(8, 6)).astype("float32")
ONES = np.ones((8, 1), "float32")


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    tfamp.disable()


def generator():
    parts = [layers.Dense(8, name="up_1"), layers.Dense(6, name="up_2")]
    return assembled(parts, "sequential", (4,))


def critic(style="functional"):
    parts = [layers.Dense(8, name="features"), layers.ELU(name="bend")]
    return assembled([*parts, layers.Dense(1, name="score")], style, (6,))


def fit(made):
    made.compile("sgd", "mse")
    made.fit(NOISE, IMAGES, verbose=0)


def kept(model):
    rows = tfamp.assignment(model)
    return {row.path for row in rows if row.rule.startswith("keep_float32")}


RULES = {
    "pattern": ("feat.*", {"features"}),
    "class name": ("ELU", {"bend"}),
    "class": (layers.ELU, {"bend"}),
    "callable": (lambda layer: isinstance(layer, layers.ELU), {"bend"}),
}


def one_after_the_other(style):
    made = generator()
    made.compile("sgd", "mse")
    judge = critic(style)
    judge.compile("sgd", "mse")
    made.fit(NOISE, IMAGES, verbose=0)
    judge.fit(IMAGES, ONES, verbose=0)
    return judge


def as_the_tutorial_of_dcgan(style):
    made = generator()
    images = made(NOISE, training=False)  # to look at one before the critic is made
    judge = critic(style)
    judge(images)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            images = made(NOISE, training=True)
            loss = tf.reduce_mean(judge(images, training=True))
        for model in (made, judge):
            assert None not in tape.gradient(loss, model.trainable_variables)

    step()
    return judge


PROGRAMS = [one_after_the_other, as_the_tutorial_of_dcgan]


@pytest.mark.parametrize("style", ["functional", "subclassed"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rule, expected", RULES.values(), ids=RULES)
@pytest.mark.quick("pattern-*", "callable-one_after_the_other-*")
def test_a_rule_for_the_second_model_acts_without_a_warning(
    rule, expected, program, style
):
    tfamp.enable("mixed_bfloat16", keep_float32=[rule])
    assert kept(program(style)) == expected  # warnings are errors


def test_a_typo_is_said_once_when_the_model_is_put_to_work():
    tfamp.enable("mixed_bfloat16", keep_float32=["upp_1", "up_2"])
    with pytest.warns(UserWarning, match="Pattern 'upp_1' in `keep_float32`") as told:
        fit(generator())
    assert len(told) == 1
    assert "'up_1'" in str(told[0].message)  # so that the typo can be seen
    assert Path(told[0].filename).name == Path(__file__).name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(generator())


def test_a_model_that_trains_alone_is_told_what_to_do_about_a_rule_for_a_later_one():
    tfamp.enable("mixed_bfloat16", keep_float32=["score"])
    made = generator()
    made.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="make that one first, or in a `tfamp.scope`"):
        made.fit(NOISE, IMAGES, verbose=0)
    assert kept(critic()) == {"score"}


@pytest.mark.quick("measure")
@pytest.mark.parametrize("way", ["measure", "apply"])
def test_other_ways_to_a_policy_ask_no_model_for_the_rules_of_another(way):
    early = generator()
    policy = "measure" if way == "measure" else "mixed_bfloat16"
    tfamp.enable(policy, keep_float32=["score"])
    made = early if way == "apply" else generator()
    if way == "apply":
        tfamp.apply(made)
    judge = critic()
    made.compile("sgd", "mse")
    judge.compile("sgd", "mse")
    made.fit(NOISE, IMAGES, verbose=0)
    judge.fit(IMAGES, ONES, verbose=0)


def test_a_typo_is_said_at_compile_where_no_other_model_can_follow():
    with tfamp.scope("mixed_bfloat16", keep_float32=["upp_1"]):
        made = generator()
    with pytest.warns(UserWarning, match="Pattern 'upp_1'"):
        made.compile("sgd", "mse")
