"""The tables of the benchmarks of tuning: what was found, and what was picked."""

from benchmarks._texts import Result, Rows, Tables, range_text


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
}
