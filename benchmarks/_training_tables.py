"""Tables of the benchmarks of tuning and of scale: what was picked, what held."""

from collections.abc import Iterator, Sequence

from benchmarks._texts import Result, Rows, Tables, interval_text, missed, range_text

Row = tuple[str, str, str]


def _figures(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    """Yields what was measured, what came out, the goal, and whether it was met."""
    for name, own in result["off"].items():
        what = f"Weights against one device, {name}"
        yield what, f"{own['off']:.1e}", f"at most {own['goal']:.1e}", own["met"]
    is_equal = result["workers_equal"]
    yield "Weights of all workers", "equal" if is_equal else "differ", "equal", is_equal
    for name, once in result["examples"].items():
        came = "each once" if once else "not each once"
        yield f"Examples of an epoch, {name}", came, "each once", once
    for name, own in result["masks"].items():
        what = f"Dropout masks agree, {name}"
        yield what, f"{own['agreement']:.3f}", "0.5 +- 0.05", own["met"]
    for policy, own in result["wire"].items():
        for name, words in (("bytes", "Bytes of a step"), ("step", "A step")):
            what = f"{words} at {result['rate']}, half over float32, {policy}"
            found = own[name]
            goal = f"at most {found['goal']:.2f}"
            yield what, interval_text(found), goal, found["met"]
    for name, own in result["costs"].items():
        what = f"A step of {own['step_milliseconds']} ms with {name} over one without"
        yield what, interval_text(own), f"at most {own['goal']:.2f}", own["met"]
    for name, own in result["kills"].items():
        what = f"Killed {own['kills']} times, {name}"
        came = "equal to the bit" if own["equal"] else "differs"
        yield (
            f"{what}: against one never killed",
            came,
            "equal to the bit",
            own["equal"],
        )
        lost, most = own["lost"], own["every_steps"]
        again = f"{what}: steps trained again, of {most} between two states"
        yield again, str(lost), f"at most {most}", lost <= most
        gone, most = own["gone_seconds"], own["gone_goal"]
        if name != "alone":
            goal = f"at most {most} s"
            yield f"{what}: all workers gone after", f"{gone} s", goal, gone <= most


def scale(result: Result) -> Rows:
    """Returns a row for each figure."""
    return [
        [what, found + missed(is_met), goal]
        for what, found, goal, is_met in _figures(result)
    ]


def scale_summary(results: Sequence[Result]) -> list[Row]:
    """Returns a row for each figure, as they have goals each."""
    return [(what, found, goal) for what, found, goal in scale(results[0])]


def tuner(result: Result) -> Rows:
    """Returns a row for each model with its guilty layers at some places."""
    rows = []
    for name, runs in result["cases"].items():
        for run in runs:
            sides = [f"{run['kept']:.2f}", f"{run['greedy_kept']:.2f}"]
            worse = [
                f"{run[key]:.4f}" + ("" if met else ", missed")
                for key, met in zip(("fresh", "other_weights"), run["met"], strict=True)
            ]
            steps = run["bisection"]
            rows.append(
                [
                    *(name, run["policy"].removeprefix("mixed_")),
                    f"{len(run['guilty'])} of {run['layers']}",
                    str(len(run["float32"])),
                    *(
                        str(run["evaluations"]),
                        "over 60" if steps is None else str(steps),
                    ),
                    *worse,
                    *(sides[0] + ("" if run["searched"] else " *"), sides[1]),
                    f"{run['seconds']:.1f} s",
                ]
            )
    return rows


def fastest_policy(result: Result) -> Rows:
    """Returns a row for each kind of network."""
    kinds: dict[str, list[Result]] = {}
    for each in result["tries"]:
        kinds.setdefault(each["kind"], []).append(each)
    return [
        [
            *(kind, str(len(own)), str(sum(each["right"] for each in own))),
            f"{max(each['behind'] for each in own) - 1:.1%}",
            range_text(each["gain"] for each in own),
            f"{range_text(each['seconds'] for each in own)} s",
        ]
        for kind, own in kinds.items()
    ]


TABLES: Tables = {
    "tuner": (
        (
            *("Model", "Policy", "Guilty", "In float32", "Evaluations", "Bisection"),
            *("Worse on fresh", "From another seed", "Saving kept", "Greedy", "Time"),
        ),
        tuner,
    ),
    "fastest_policy": (
        (
            *("Networks", "Tries", "Right", "Furthest behind the fastest"),
            *("Fastest over float32", "Measuring took"),
        ),
        fastest_policy,
    ),
    "scale": (("What", "Found", "Goal"), scale),
}
