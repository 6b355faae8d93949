"""What training on several replicas and workers gives, sends and costs.

Prints how far the weights of two replicas and of two workers are from those of one
device, of even and uneven batches, with accumulation and under mixed policies; whether
examples come once in an epoch; how alike dropout masks are; which part of the bytes
and of a step on a wire of 100 Mbit/s is left with `reduce_dtype="auto"`; what `Resume`
and the weighting of uneven batches add to a step; and whether a training that is killed
at random moments, alone, on two workers and under Ray, equals one that is not.

Time: about forty minutes on two CPU cores. Use an idle machine. Workers run in a
network namespace, which needs `unshare`, `ip` and `tc`.
"""

import collections
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import _runner
from benchmarks import _scale_kills as kills
from benchmarks import _scale_workers as workers
from benchmarks._turns import MEAN, MEDIAN, compare_fits, fit_side, ratio

FLAGS = (
    ("integer", "turns", 20, "Turns of each side of costs."),
    ("integer", "wire_turns", 5, "Turns of each side on the wire."),
    ("string", "rate", "100mbit", "Rate of the wire."),
    ("integer", "kills", 20, "Kills of each training that goes on; 0 for none."),
)
EXACT = 1e-6
# Weights of about 1 after six updates, each of gradients that are rounded a few times.
TOLERANCES = {
    "float32": EXACT,
    "mixed_float16": 16 * 2.0**-11,
    "mixed_bfloat16": 16 * 2.0**-8,
}
BYTES_GOAL, WIRE_GOAL, COST_GOAL = 0.51, 0.55, 1.02
EVERY_STEPS = 500


def furthest(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """Returns the largest difference of any weight, by policy."""
    worst: dict[str, float] = {}
    for case, weights in found.items():
        _, policy, _ = json.loads(case)
        pairs = zip(weights, exact[case], strict=True)
        off = max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)
        worst[policy] = max(worst.get(policy, 0.0), off)
    return worst


def agreement(masks: list[list[bool]]) -> float:
    """Returns the share of places at which two masks are the same."""
    first, second = map(np.array, masks[:2])
    return round(float(np.mean(first == second)), 3)


def come_once(parts: list[list[int]], count: int) -> bool:
    """Returns whether the workers had each example once between them."""
    counts = collections.Counter(sum(parts, []))
    return counts == dict.fromkeys(range(count), 1)


def measure_side(what: str, **asked: Any) -> Any:
    """Returns what one process finds: one device, two replicas, costs, or kills."""
    import tensorflow as tf

    if what == "kills":
        return kills.killed(asked["setting"], asked["kills"])
    if what == "alone":
        return workers.many(None, asked["policies"])
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    if what == "resume":
        return resume_cost(asked["turns"], asked["steps"])
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    if what == "weighting":
        return weighting_cost(strategy, asked["turns"], asked["steps"])
    weights = workers.many(strategy, asked["policies"])
    return {"weights": weights, "mask": workers.mask(strategy)}


def _network(width: int = 256) -> Any:
    import keras

    import tfamp

    with tfamp.scope("float32"):
        hidden = [keras.layers.Dense(width, "relu") for _ in range(2)]
        layers = [keras.Input((width,)), *hidden, keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    return model


def _batches(width: int = 256, size: int = 128) -> Any:
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(4 * size, width)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    return data.batch(size).cache().repeat().prefetch(2)


def resume_cost(turns: int, steps: int) -> dict[str, Any]:
    """Returns the mean step with `Resume` over one without."""
    import tfamp

    data, model = _batches(), _network()

    def with_resume() -> tuple[float, float, float]:
        # Anew in each turn: what has ended in a folder is not trained again.
        with tempfile.TemporaryDirectory() as folder:
            resume = tfamp.callbacks.Resume(folder, every_steps=EVERY_STEPS)
            turn: tuple[float, float, float] = fit_side(model, data, [resume], steps)()
            return turn

    sides = {"none": fit_side(_network(), data, [], steps), "resume": with_resume}
    return compare_fits(sides, turns, what=MEAN)


def weighting_cost(strategy: Any, turns: int, steps: int) -> dict[str, Any]:
    """Returns the median step of two replicas that are weighted, over one without."""
    data = _batches()
    with strategy.scope():
        models = {"stock": _network(), "weighted": _network()}
    off = "tfamp.loss_scale.fit_hooks.weights_replicas"
    with mock.patch(off, lambda model: False):  # as long as the step is traced
        models["stock"].fit(data, steps_per_epoch=2, verbose=0)
    sides = {name: fit_side(m, data, [], steps) for name, m in models.items()}
    return compare_fits(sides, turns, what=MEDIAN)


def on_the_wire(found: list[Any]) -> dict[str, Any]:
    """Returns ratios of bytes and seconds in half precision over float32."""
    figures = np.array(found)  # (turns, sides, (bytes, seconds))
    per_step = np.median(figures, axis=0)
    result = {
        "megabytes": [round(float(side[0]) / 1e6, 3) for side in per_step],
        "milliseconds": [round(float(side[1]) * 1e3, 1) for side in per_step],
    }
    for place, (name, goal) in enumerate(
        {"bytes": BYTES_GOAL, "step": WIRE_GOAL}.items()
    ):
        own = ratio(figures[:, 1, place], figures[:, 0, place])
        result[name] = {**own, "goal": goal, "met": own["ratio"] <= goal}
    return result


def killed_settings(*, is_smoke: bool) -> list[str]:
    """Returns where trainings are killed: under Ray only where it is installed."""
    settings = list(kills.PACES)[: 1 if is_smoke else None]
    has_ray = importlib.util.find_spec("ray") is not None
    return [name for name in settings if has_ray or "Ray" not in name]


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    is_smoke = settings.smoke
    policies = ["float32"] if is_smoke else list(TOLERANCES)
    wired = workers.WIRE_POLICIES[:1] if is_smoke else workers.WIRE_POLICIES
    sizes = {"width": 374, "turns": settings.wire_turns, "steps": 10}
    costs = {"turns": settings.turns, "steps": 1000}
    if is_smoke:
        sizes = {"width": 64, "turns": 1, "steps": 2}
        costs = {"turns": 2, "steps": 24}
    num_kills = min(settings.kills, 2) if is_smoke else settings.kills
    where = killed_settings(is_smoke=is_smoke) if num_kills else []

    def side(what: str, **asked: Any) -> Any:
        return _runner.in_a_process("scale", {"what": what, **asked})

    alone = side("alone", policies=policies)
    mirrored = side("mirrored", policies=policies)
    with tempfile.TemporaryDirectory() as folder:
        two = workers.in_namespace(2, Path(folder), {"policies": policies})
        three = workers.in_namespace(3, Path(folder), {})
        asked = {"wire": wired, "sizes": sizes}
        slow = workers.in_namespace(2, Path(folder), asked, settings.rate)
    together = {"2 replicas": mirrored["weights"], "2 workers": two[0]["weights"]}
    off = {name: furthest(weights, alone) for name, weights in together.items()}
    masks = {
        "2 replicas": agreement(mirrored["mask"]),
        "2 workers": agreement([each["mask"][0] for each in two]),
    }
    found: dict[str, Any] = {
        "off": {
            f"{name}, {policy}": {
                "off": own,
                "goal": TOLERANCES[policy],
                "met": own <= TOLERANCES[policy],
            }
            for name, each in off.items()
            for policy, own in each.items()
        },
        "workers_equal": all(each["weights"] == two[0]["weights"] for each in two),
        "examples": {
            f"{len(each)} workers": come_once([one["seen"] for one in each], 41)
            for each in (two, three)
        },
        "masks": {
            name: {"agreement": own, "met": abs(own - 0.5) <= 0.05}
            for name, own in masks.items()
        },
        "rate": settings.rate,
        "wire": {policy: on_the_wire(slow[0][policy]) for policy in wired},
        "costs": {name: side(name, **costs) for name in ("resume", "weighting")},
        "kills": {each: side("kills", setting=each, kills=num_kills) for each in where},
    }
    for name, own in (("resume", "resume"), ("weighting", "weighted")):
        cost = found["costs"][name]
        found["costs"][name] = {
            **cost[own],
            "step_milliseconds": cost["step_milliseconds"],
            "goal": COST_GOAL,
            "met": cost[own]["ratio"] <= COST_GOAL,
        }
    return found
