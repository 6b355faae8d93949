"""How much worse `tune` says that a plan may be, against SciPy's binomial limits.

The model reads thresholds: examples that lie 0.003 above one are below it once they are
rounded to bfloat16, so that it is known which answers change, and in which direction.
"""

import keras
import numpy as np
import pytest

import tfamp

stats = pytest.importorskip("scipy.stats", reason="the limits to compare with")

NUM_EXAMPLES = 6000  # half of them judge at the end
TOLERANCE = 0.01
# Chance of a bound too low that is left for the judgement at the end.
RATE = 0.025


def thresholds():
    """Returns a trained classifier: 1 where the input is above 1."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, name="distance"),
            keras.layers.Dense(1, activation="sigmoid", name="answer"),
        ]
    )
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
    weights = [[1.0]], [-1.0], [[100.0]], [0.0]
    model.set_weights([np.array(each, "float32") for each in weights])
    return model


def answers(lost, won):
    """Returns examples of which bfloat16 gets as many wrong, and as many right."""
    x = np.where(np.arange(NUM_EXAMPLES) % 3, 2.0, 0.0).astype("float32")[:, None]
    y = (x > 1).astype("float32")
    # A batch has 100 examples, and every second one judges at the end.
    in_the_end = np.flatnonzero(np.arange(NUM_EXAMPLES) // 100 % 2)
    in_the_search = np.flatnonzero(np.arange(NUM_EXAMPLES) // 100 % 2 == 0)
    for half in (in_the_search, in_the_end):
        x[half[: lost + won]] = 1.003
        y[half[:lost]], y[half[lost : lost + won]] = 1.0, 0.0
    return x, y


@pytest.mark.quick("0-0")
@pytest.mark.filterwarnings("ignore:.*retracing.*")
@pytest.mark.parametrize(("lost", "won"), [(0, 0), (11, 0), (7, 6)])
def test_a_plan_is_at_most_as_much_worse_as_its_changed_answers_allow(lost, won):
    data = answers(lost, won)
    plan = tfamp.tune(
        thresholds(),
        data,
        policy="mixed_bfloat16",
        tolerance=TOLERANCE,
        metric="accuracy",
        batch_size=100,
        max_evaluations=4,
    )
    found = plan.evidence["tuning"]["confirmed"]
    number = NUM_EXAMPLES // 2
    assert plan.policy == "mixed_bfloat16" and found["num_examples"] == number
    assert found["float32"] == []
    assert found["worsening"] == pytest.approx((lost - won) / number)
    exact = stats.beta.isf(RATE, lost + 1, number - lost)
    if won:
        # Answers that are won say that less is lost in the balance; the spread of both
        # is that of a Poisson difference at least.
        spread = np.sqrt(lost + won) / number
        least = (lost - won) / number + stats.norm.isf(RATE) * spread
        assert least < found["bound"] < exact
    else:
        assert found["bound"] == pytest.approx(exact, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*retracing.*")
def test_a_loss_that_the_examples_leave_possible_is_not_taken():
    # 20 of 3,000 are lost, 0.67 %. Up to 1.03 % may be, which is beyond 1 %.
    plan = tfamp.tune(
        thresholds(),
        answers(20, 0),
        policy="mixed_bfloat16",
        tolerance=TOLERANCE,
        metric="accuracy",
        batch_size=100,
        max_evaluations=4,
    )
    tried = plan.evidence["tuning"]["evaluations"]
    alone = [each for each in tried if not each["float32"]]
    assert all(not each["holds"] for each in alone)
    assert plan.layers["distance"] == "float32"
