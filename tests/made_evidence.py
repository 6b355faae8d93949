"""Evidence that was made up, for tests of what is done with it."""

import dataclasses
import math

import tfamp
from tfamp.comparison.result import conclude
from tfamp.machine.speeds import Device
from tfamp.trials.run_records import Context, Latency, Memory, Run

CONTEXT = Context(
    devices=(Device("cpu", "Made Up Processor", features=("avx512_bf16",)),),
    versions={"tfamp": "0.1", "tensorflow": "2.21.0", "keras": "3.15.1"},
    system="Linux 6.1, Python 3.11.2",
    num_cores=2,
    command="tfamp compare recipes.train_digits:build --seeds 3",
    date="2026-01-31",
)
LAYERS = {"conv": "bfloat16", "head <b>": "float32"}


def run(policy: str, seed: int, *, speed: float = 1.0, metric: float = 0.9) -> Run:
    """Returns a run whose speed is `speed` times 1,000 examples/s."""
    wave = 1 + 0.01 * math.sin(7 * seed + len(policy))
    step = 0.064 / speed / wave
    resolved = policy.split("+")[0].removeprefix("keras:")
    steps = range(10, 310, 10)
    return Run(
        policy,
        seed,
        resolved_policy="mixed_float16" if ".json" in policy else resolved,
        reason="it was made up",
        batch_size=64,
        num_steps=300,
        num_epochs=3,
        num_parameters=12345,
        examples_per_second=1000 * speed * wave,
        step_seconds=step,
        first_step_seconds=2.0 + speed,
        history={
            "loss": (1.0, 0.6, 0.4),
            "accuracy": (0.5, 0.7, metric),
            "val_loss": (1.1, 0.7, 0.5),
            "val_accuracy": (0.5, 0.7, metric + 0.001 * seed),
        },
        final_metrics={"loss": 0.5, "accuracy": metric + 0.001 * seed},
        num_examples=1_000_000,
        losses=tuple((s, 2.0 * math.exp(-s / 150) + 0.01 * seed) for s in steps),
        skipped_steps=1 if "mixed_float16" in policy else 0,
        latencies=(
            Latency.of(1, [0.001 / speed, 0.0012 / speed, 0.003 / speed]),
            Latency.of(64, [0.02 / speed, 0.021 / speed, 0.03 / speed]),
        ),
        memory=Memory(500 * 2**20, int((500 + 400 / speed) * 2**20)),
        layers=LAYERS,
    )


def evidence(
    policies: dict[str, tuple[float, float]] | None = None,
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    replaced: tuple[Run, ...] = (),
    **changed: object,
) -> tfamp.Comparison:
    """Returns a comparison of policies with the first as the reference.

    Args:
        policies: Policy -> its speed (float32 has 1) and its metric.
        seeds: Of each policy's runs.
        replaced: Runs that stand in the place of those with their policy and seed.
        **changed: Other fields.
    """
    policies = policies or {"float32": (1.0, 0.98), "auto": (1.9, 0.98)}
    stand_in = {(each.policy, each.seed): each for each in replaced}
    runs = tuple(
        stand_in.get((policy, seed), run(policy, seed, speed=speed, metric=metric))
        for seed in seeds
        for policy, (speed, metric) in policies.items()
    )
    found = conclude(
        runs,
        title="digits CNN",
        policies=tuple(policies),
        seeds=seeds,
        metric=None,
        better=None,
        tolerance=0.005,
        context=CONTEXT,
        notes=("Figures are made up.",),
    )
    return dataclasses.replace(found, **changed)
