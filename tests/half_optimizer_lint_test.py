"""What stock optimizers lose on half-precision weights, and the rules that tell it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.lint_rules_test import batch, head, places, sequential, stock
from tfamp.numerics.lint import lint

L = keras.layers
K = keras.optimizers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def trained(optimizer, dtype, weights, *gradients):
    """Weights after updates by stock Keras, and the optimizer's own variables."""
    variable = keras.Variable(np.array(weights, "float32"), dtype=dtype)
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([tf.fill([len(weights)], tf.cast(gradient, dtype))])
    slots = {v.path.split("/")[-1].split("_")[-1]: v for v in optimizer.variables}
    return numbers(variable), {name: numbers(v) for name, v in slots.items()}


def numbers(variable):
    return np.ravel(tf.cast(variable.value, "float32").numpy()).tolist()


# --- what Keras computes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rates_are_cast_to_the_weight_and_moments_are_stored_as_it_is(dtype):
    optimizer = K.Adam(0.1)
    trained(optimizer, dtype, [1.0], 1.0)
    stored = {v.path.split("/")[-1]: v.dtype for v in optimizer.variables}
    assert stored.pop("learning_rate") == "float32"
    assert stored.pop("iteration").startswith("int")
    assert set(stored.values()) == {dtype}


@pytest.mark.parametrize("cls", [K.Adam, K.AdamW, K.Lamb])
def test_adam_moves_no_bfloat16_weight_at_its_default_beta(cls):
    # sqrt(1 - 1**t) is 0, and so is every update.
    assert trained(cls(0.1), "bfloat16", [1.0], *[1.0] * 10)[0] == [1.0]
    moved = trained(cls(0.1, beta_2=0.99), "bfloat16", [1.0], 1.0)[0][0]
    # One update is about the rate, with the errors of some roundings of 2**-8.
    assert abs(moved - 0.9) < 8 * 2**-8


DIVERGING = {
    "Nadam, beta_2": (lambda b: K.Nadam(0.1, beta_2=b), np.isnan),
    "Adam, beta_1": (lambda b: K.Adam(0.1, beta_1=b, beta_2=0.9), np.isinf),
    "Lamb, beta_1": (lambda b: K.Lamb(0.1, beta_1=b, beta_2=0.9), np.isnan),
    "Adamax, beta_1": (lambda b: K.Adamax(0.1, beta_1=b), np.isinf),
}


@pytest.mark.parametrize("dtype, beta", [("float16", 0.9998), ("bfloat16", 0.999)])
@pytest.mark.parametrize("make, is_bad", DIVERGING.values(), ids=DIVERGING)
def test_other_betas_that_are_1_end_in_infinity_or_nan(make, is_bad, dtype, beta):
    assert is_bad(trained(make(beta), dtype, [1.0], 1.0)[0]).all()
    assert np.isfinite(trained(make(0.95), dtype, [1.0], 1.0)[0]).all()


def test_a_momentum_that_is_1_never_decays():
    for momentum, left in ((0.999, -0.25), (0.5, -0.125)):
        _, slots = trained(K.SGD(0.25, momentum), "bfloat16", [1.0], 1.0, 0.0)
        assert slots["momentum"] == [left]


def test_an_average_of_lion_that_is_1_takes_no_gradient():
    assert trained(K.Lion(0.5, beta_2=0.999), "bfloat16", [1.0], 1.0)[1][
        "momentum"
    ] == [0.0]


def test_an_average_of_weights_that_is_1_stays_at_the_first_update():
    # The weight goes 1, 0.75, 0.5; the average begins at 0.75.
    for momentum, average in ((0.999, 0.75), (0.5, 0.625)):
        optimizer = K.SGD(0.25, use_ema=True, ema_momentum=momentum)
        weights, slots = trained(optimizer, "bfloat16", [1.0], 1.0, 1.0)
        assert (weights, slots["average"]) == ([0.5], [average])


def test_weight_decay_below_half_a_spacing_is_lost():
    ulp = 2.0**-10  # from 1 on in float16; half of it below 1

    def decayed(weights, rate, decay):
        optimizer = K.SGD(rate, weight_decay=decay)
        return trained(optimizer, "float16", weights, 0.0)[0]

    weights = [1.0, 1 + ulp]
    assert decayed(weights, 2.0**-6, 2.0**-7) == weights
    # Three quarters of half a spacing above 1, and one and a half times that below.
    assert decayed(weights, 1.5 * 2**-6, 2.0**-6) == [1 - ulp / 2, 1 + ulp]
    assert decayed(weights, 2.0**-5, 2.0**-5) == [1 - ulp, 1.0]


def test_an_update_of_half_a_spacing_is_lost():
    # Lion's update is the rate itself; below 1 bfloat16 lies 2**-8 apart.
    assert trained(K.Lion(2.0**-9), "bfloat16", [1.0], 1.0)[0] == [1.0]
    assert trained(K.Lion(2.0**-8), "bfloat16", [1.0], 1.0)[0] == [1 - 2.0**-8]


def test_adafactors_epsilon_is_0_in_float16():
    assert np.isnan(trained(K.Adafactor(0.1), "float16", [1.0], 0.0)[0]).all()
    safe = K.Adafactor(0.1, epsilon_1=1e-7)
    assert trained(safe, "float16", [1.0], 0.0)[0] == [1.0]


# --- the rules


def model_of(dtype, optimizer, name="low"):
    with stock(dtype):
        return sequential(L.Dense(8, name=name), head(), optimizer=optimizer)


BETA_1 = {"beta_1": 0.999, "beta_2": 0.9}
EMA = {"use_ema": True, "ema_momentum": 0.999}
NO_MOVE, INFINITE = "no weight ever moves", "weights turn infinite or NaN"
NOT_COUNTED = "new gradients do not count in its average"
NO_DECAY = "what it has gathered never decays"
STAYS = "the average stays what it was after the first update"
ROUNDED = {
    "Adam": (K.Adam, {}, "error", NO_MOVE),
    "AdamW": (K.AdamW, {}, "error", NO_MOVE),
    "Lamb": (K.Lamb, {}, "error", NO_MOVE),
    "Nadam": (K.Nadam, {}, "error", "every weight turns NaN"),
    "Adamax": (K.Adamax, {}, "warning", NO_DECAY),
    "beta_1": (K.Adam, BETA_1, "error", INFINITE),
    "Adamax's beta_1": (K.Adamax, BETA_1, "error", INFINITE),
    "Nadam's beta_1": (K.Nadam, BETA_1, "warning", NOT_COUNTED),
    "Lion": (K.Lion, {"beta_2": 0.999}, "warning", NOT_COUNTED),
    "SGD": (K.SGD, {"momentum": 0.999}, "warning", NO_DECAY),
    "RMSprop": (K.RMSprop, {"rho": 0.999}, "warning", NO_DECAY),
    "average of weights": (K.SGD, EMA, "warning", STAYS),
}


@pytest.mark.parametrize(
    "cls, options, severity, effect", ROUNDED.values(), ids=ROUNDED
)
def test_rounded_momentum_tells_what_a_beta_of_1_does(cls, options, severity, effect):
    (found,) = lint(model_of("bfloat16", cls(0.1, **options))).of(
        rule="rounded-momentum"
    )
    assert (found.severity, found.layer) == (severity, "low")
    assert "is 1 in bfloat16, in which 'low' are stored: " in found.message
    assert effect in found.message
    assert "Use the policy 'mixed_bfloat16'" in found.remedy
    assert "=0.99`" in found.remedy


def test_rounded_momentum_tells_the_argument_and_its_value():
    (found,) = lint(model_of("bfloat16", K.Adam(name="mine"))).of(
        rule="rounded-momentum"
    )
    assert found.message.startswith("`beta_2=0.999` of 'mine' is 1 in bfloat16")
    assert (found.figure, found.details["argument"]) == (0.999, "beta_2")


def test_rounded_momentum_asks_the_dtype_of_the_weights():
    rule = "rounded-momentum"
    assert places(model_of("float16", K.Adam()), rule) == []
    assert places(model_of("float16", K.Adam(beta_2=0.9998)), rule) == [
        ("error", "low")
    ]
    assert places(model_of("mixed_bfloat16", K.Adam()), rule) == []
    # 1 - 2**-9 is a tie between 1 and 1 - 2**-8, and goes to 1.
    tie, below = 1 - 2.0**-9, 1 - 1.01 * 2.0**-9
    assert places(model_of("bfloat16", K.SGD(0.1, tie)), rule) == [("warning", "low")]
    assert places(model_of("bfloat16", K.SGD(0.1, below)), rule) == []
    unused = K.SGD(0.1, ema_momentum=0.999)
    assert places(model_of("bfloat16", unused), rule) == []


def gammas(dtype, optimizer, values):
    """A model with a scale of these values, of which the bias is frozen away."""
    with stock(dtype):
        norm = L.LayerNormalization(name="norm", center=False)
        model = sequential(norm, head(), optimizer=optimizer, shape=(len(values),))
    norm.set_weights([np.array(values)])
    return model


def test_lost_updates_tells_the_weight_and_how_much_of_it_stays():
    # Of 1 and 1 half the distance is 2**-9, a tie; 1/8 and 0 lie closer.
    model = gammas("bfloat16", K.Lion(2.0**-9, name="mine"), [1, 1, 0.125, 0])
    (found,) = lint(model).of(rule="lost-updates")
    assert (found.severity, found.layer, found.figure) == ("warning", "norm", 0.5)
    assert found.message == (
        "50.0 % of weight 'gamma' of 'norm' do not move by updates of 0.002, the "
        "learning rate of 'mine': they are stored in bfloat16, where that is less than "
        "half the distance to the next number."
    )
    assert found.remedy.startswith("Use the policy 'mixed_bfloat16'")


MOVING = {
    "most numbers": ("bfloat16", K.Lion, 2.0**-9, [1, 0.125, 0.125, 0]),
    "a larger rate": ("bfloat16", K.Lion, 2.0**-8, [1, 1]),
    "float16": ("float16", K.Lion, 2.0**-9, [1, 1]),
    "float32 weights": ("mixed_bfloat16", K.Lion, 2.0**-9, [1, 1]),
    # Its update is as large as the gradient, which nobody knows yet.
    "SGD": ("bfloat16", K.SGD, 2.0**-9, [1, 1]),
}


@pytest.mark.parametrize("dtype, cls, rate, values", MOVING.values(), ids=MOVING)
def test_lost_updates_lets_weights_that_move_be(dtype, cls, rate, values):
    assert places(gammas(dtype, cls(rate), values), "lost-updates") == []


def test_lost_updates_asks_a_schedule_for_its_largest_rate():
    schedules = K.schedules
    warm = schedules.PolynomialDecay(0.0, 100, end_learning_rate=0.1)
    low = schedules.PolynomialDecay(0.0, 100, end_learning_rate=2.0**-9)
    values = [1.0, 1.0]
    rule = "lost-updates"
    assert places(gammas("bfloat16", K.Lion(warm), values), rule) == []
    assert places(gammas("bfloat16", K.Lion(low), values), rule) == [
        ("warning", "norm")
    ]


def test_a_schedule_that_cannot_be_asked_is_told():
    class Own(K.schedules.LearningRateSchedule):
        def __call__(self, step):
            raise RuntimeError("not now")

    skipped = lint(model_of("float16", K.SGD(Own()))).skipped
    assert "lost-updates: the schedule Own cannot be asked (RuntimeError)" in skipped


# dtype, rate, decay, whose decay is lost. float16 lies 2**-10 apart from 1 on.
DECAYS = {
    "all": ("float16", 2.0**-6, 2.0**-7, "any weight"),
    "part": ("float16", 2.0**-6, 2.0**-6, "part of the weights"),
    "enough": ("float16", 2.0**-5, 2.0**-6, None),
    "bfloat16": ("bfloat16", 2.0**-5, 2.0**-5, "any weight"),
    "float32 weights": ("mixed_float16", 2.0**-6, 2.0**-7, None),
    "none": ("float16", 2.0**-6, None, None),
}


@pytest.mark.parametrize("dtype, rate, decay, whose", DECAYS.values(), ids=DECAYS)
def test_lost_updates_tells_a_decay_that_is_rounded_away(dtype, rate, decay, whose):
    model = model_of(dtype, K.SGD(rate, weight_decay=decay))
    found = lint(model).of(rule="lost-updates")
    if whose is None:
        assert len(found) == 0
    else:
        (each,) = found
        assert (each.severity, each.layer) == ("warning", "low")
        assert f"it does not shrink {whose} of 'low'" in each.message


def test_optimizer_epsilon_knows_adafactors():
    rule = "optimizer-epsilon"
    (found,) = lint(model_of("float16", K.Adafactor(name="mine"))).of(rule=rule)
    assert found.severity == "error"
    assert found.message.startswith("The epsilon_1 1e-30 of 'mine' is 0 in")
    assert found.remedy.startswith(
        "Use the policy 'mixed_float16', which keeps weights and moments in float32, "
        "or pass `epsilon_1=1e-07`."
    )
    assert places(model_of("float16", K.Adafactor(epsilon_1=1e-7)), rule) == []
    assert places(model_of("bfloat16", K.Adafactor()), rule) == []


def test_optimizer_epsilon_tells_one_that_is_large_enough():
    (found,) = lint(model_of("float16", K.Adam())).of(rule="optimizer-epsilon")
    assert "or pass `epsilon=1e-03`." in found.remedy
    large = K.Adam(epsilon=1e-3)
    assert places(model_of("float16", large), "optimizer-epsilon") == []


# Optimizer, examples in a batch -> rule for the rate; None where nothing is noted.
RATES = {
    "SGD": (K.SGD, 256, "linear"),
    "Adam": (K.Adam, 256, "sqrt"),
    "a usual batch": (K.SGD, 255, None),
    "accumulated": (lambda: K.SGD(gradient_accumulation_steps=4), 64, "linear"),
    "a rate of one's own": (lambda: K.SGD(0.02), 256, None),
    "scaled": (
        lambda: tfamp.LossScaleOptimizer(K.SGD(), accumulation_steps=4),
        64,
        "linear",
    ),
}


@pytest.mark.parametrize("make, size, law", RATES.values(), ids=RATES)
def test_rate_for_batch_notes_default_rates_of_large_updates(make, size, law):
    model = model_of("float32", make())
    found = lint(model, data=batch(16, size=size), batch_size=size)
    rates = [(f.severity, f.figure) for f in found.of(rule="rate-for-batch")]
    assert rates == ([("note", 256)] if law else [])
    if law:
        remedy = found.of(rule="rate-for-batch")[0].remedy
        assert f"batch_size=256, base_batch_size=32, rule='{law}')" in remedy
