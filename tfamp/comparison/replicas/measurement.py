"""The stages of a measurement: one device, first steps, times, and what they say."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from tfamp.comparison.replicas import judgement
from tfamp.comparison.replicas.judgement import (
    MODES,
    Equality,
    Kind,
    OneDevice,
    ScalingPoint,
    Times,
    size_of,
)
from tfamp.comparison.replicas.processes import Answer, Replicas
from tfamp.comparison.replicas.result import Scaling
from tfamp.comparison.replicas.steps import distances, tolerances
from tfamp.records.versions import installed_versions
from tfamp.stepping.input_waits import Bottleneck
from tfamp.trials.processes import uninterrupted

# Intervals of fewer rounds are wide; of more, hardly narrower.
_MIN_ROUNDS, _MAX_ROUNDS = 6, 30
# A turn is long beside a clock, and short beside what drifts.
_TURN_SECONDS, _MAX_STEPS_A_TURN = 0.2, 25
_HALF = ("float16", "bfloat16")


def num_gpus() -> int:
    """Returns the GPUs of this machine that TensorFlow may use."""
    # The physical ones: to list the logical ones would start them.
    return len(tf.config.get_visible_devices("GPU"))


def check_batch(batch_size: int, numbers: Sequence[int]) -> None:
    """Raises unless there is an example for each replica."""
    if batch_size < max(numbers):
        raise ValueError(
            f"A batch has {batch_size} examples, and `replicas` holds {max(numbers)}; "
            "expected an example for each replica. Pass a larger `batch_size`."
        )


class Measurement:
    """The processes of all numbers of replicas, from the first to the last one."""

    def __init__(
        self,
        folder: Path,
        kind: Kind,
        numbers: Sequence[int],
        *,
        timeout_seconds: float,
        show: Callable[..., None],
    ) -> None:
        self._folder, self._kind, self._numbers = folder, kind, numbers
        self._timeout, self._show = timeout_seconds, show
        self._stage, self._what = 0, ""
        self._groups: dict[int, Replicas] = {}

    def end(self) -> None:
        """Ends all processes."""
        for group in self._groups.values():
            group.end()

    def measure(self, seconds: float, notes: list[str]) -> Scaling:
        """Goes through the stages, and returns what they came to."""
        (facts,) = self._start(1)
        check_batch(facts["batch_size"], self._numbers)
        self._at("Looking at one device")
        (gates,) = self._groups[1].ask("gates")
        one = OneDevice(
            gates["half_share"],
            tuple(gates["causes"]),
            Bottleneck.from_dict(gates["bottleneck"]),
        )
        equality = self._compare_steps(facts, notes)
        points: tuple[ScalingPoint, ...] = ()
        rounds = 0
        if all(each.is_equal is not False for each in equality):
            one, points, rounds = self._time(one, facts, seconds)
        shares = self._kind == "logical CPUs" or not num_gpus()
        weak = [each for each in points if each.mode == "weak"]
        point = max(weak, key=lambda each: each.replicas, default=None)
        verdict, reason = judgement.judge(point, equality, one, shares_devices=shares)
        advice = judgement.advise(
            *(verdict, point, one),
            is_half=any(name in _HALF for name in facts["compute_dtypes"]),
            has_workers=self._kind == "workers",
        )
        if shares and points:
            notes.append(
                "The replicas share the cores of this machine, so efficiency says "
                "nothing of GPUs or of other machines; equality and bytes do."
            )
        return Scaling(
            model=facts["model"],
            policy=facts["policy"],
            kind=self._kind,
            devices=tuple(facts["devices"]),
            shares_devices=shares,
            batch_size=facts["batch_size"],
            verdict=verdict,
            reason=reason,
            advice=advice,
            one_device=one,
            equality=equality,
            points=points,
            rounds=rounds,
            notes=tuple(dict.fromkeys(notes)),
            versions=installed_versions(),
        )

    def _compare_steps(self, facts: Answer, notes: list[str]) -> tuple[Equality, ...]:
        found = []
        self._at("Making first steps on one device")
        (first,) = self._groups[1].ask("first_steps", steps=None)
        notes += first["notes"]
        for number in self._numbers[1:]:
            self._start(number)
            self._at(f"Making first steps on {number} replicas")
            answer, *_ = self._groups[number].ask("first_steps", steps=first["steps"])
            apart = distances(self._folder, number)
            allowed = tolerances(
                facts["compute_dtypes"],
                tf32=facts["tf32"],
                has_slots="slots" in apart,
            )
            allowed = {name: allowed[name] for name in apart}
            is_equal: bool | None = all(apart[n] <= allowed[n] for n in apart)
            if not is_equal and answer["random"]:
                is_equal = None
                names = ", ".join(answer["random"][:3])
                notes.append(
                    f"Whether {number} replicas take the steps of one device is not "
                    f"known: {names} draw at random in each step."
                )
            found.append(Equality(number, is_equal, apart, allowed, first["steps"]))
        return tuple(found)

    def _time(
        self, one: OneDevice, facts: Answer, seconds: float
    ) -> tuple[OneDevice, tuple[ScalingPoint, ...], int]:
        steps: dict[tuple[int, str], int] = {}
        payload: dict[int, int | None] = {}
        round_seconds = 0.0
        for number, group in self._groups.items():
            self._at(f"Tracing the step of {number} replicas")
            answers = group.ask("trace")
            # Gradients are the same on all of them.
            payload[number] = answers[0]["reduced_bytes"]
            for name in answers[0]["seconds"]:
                slowest = max(each["seconds"][name] for each in answers)
                count = math.ceil(_TURN_SECONDS / max(slowest, 1e-6))
                steps[number, name] = min(count, _MAX_STEPS_A_TURN)
                round_seconds += slowest * steps[number, name]
        rounds = round(seconds / max(round_seconds, 1e-3))
        rounds = min(max(rounds, _MIN_ROUNDS), _MAX_ROUNDS)
        times: dict[tuple[int, str], list[list[float]]] = {key: [] for key in steps}
        for turn in range(rounds):
            self._at(f"Timing steps, round {turn + 1} of {rounds}")
            keys = list(steps)
            # Each goes first in its turn.
            for number, name in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
                answers = self._groups[number].ask(
                    "time", step=name, number=steps[number, name]
                )
                times[number, name].append([each["seconds"] for each in answers])
        alone = [own for (own,) in times[1, "strong"]]
        one = dataclasses.replace(one, step_seconds=statistics.median(alone))
        points = []
        for number in self._numbers[1:]:
            for mode in MODES:
                real = [max(each) for each in times[number, mode]]
                by_process = list(zip(*times[number, f"{mode} alone"], strict=True))
                own = Times(alone, real, by_process)
                step_seconds = statistics.median(real)
                # Of strong scaling all replicas share one batch, and each worker reads
                # its own part.
                batches = number if mode == "weak" else 1
                read = batches / number if self._kind == "workers" else batches
                share = judgement.input_share(one, step_seconds, batches=read)
                points.append(
                    ScalingPoint(
                        mode=mode,
                        replicas=number,
                        batch_size=size_of(mode, facts["batch_size"], number),
                        step_seconds=step_seconds,
                        efficiency=judgement.efficiency(own, gain=batches / number),
                        communication_share=judgement.communication_share(own),
                        slow_worker_share=judgement.slow_worker_share(own),
                        input_share=share,
                        reduced_bytes=payload[number],
                        sent_bytes=judgement.sent_bytes(payload[number], number),
                    )
                )
        return one, tuple(points), rounds

    def _start(self, number: int) -> list[Answer]:
        what = "one device" if number == 1 else f"{number} replicas"
        self._at(f"Starting {what}")
        with uninterrupted():
            self._groups[number] = Replicas(
                self._folder,
                number,
                self._kind,
                timeout_seconds=self._timeout,
                on_wait=lambda: self._show(self._stage, self._what),
            )
        return self._groups[number].answers()

    def _at(self, what: str) -> None:
        self._stage, self._what = self._stage + 1, what
        self._show(self._stage, what)
