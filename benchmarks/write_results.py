"""Writes benchmarks/RESULTS.md from what the benchmarks left in benchmarks/results.

Command: python benchmarks/write_results.py [--output=FILE]
Time: a second.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

FOLDER = Path(__file__).resolve().parent
TEXTS = FOLDER / "results"
ORDER = (
    *("enable_overhead", "loss_scale", "pipeline"),
    *("training", "tried", "equal_policies", "callbacks_cost"),
    *("guilty_layers", "guilty_layers_further"),
    *("guards", "shadow_pass", "freeze", "memory", "resident", "remat"),
)


def sections(folder: Path) -> list[str]:
    """Returns the text of each benchmark that left something, in order."""
    found = []
    for name in ORDER:
        figures, text = folder / f"{name}.json", folder / f"{name}.md"
        if figures.is_file():
            write = WRITERS.get(name, training)
            found.append(write(json.loads(figures.read_text("utf-8")), name))
        elif text.is_file():
            found.append(text.read_text("utf-8"))
    return found


def training(result: dict[str, Any], kind: str = "training") -> str:
    """Returns a section of benchmarks/training.py, by the text that it begins with."""
    models = result["models"]
    first = next(iter(models.values()))
    versions = first["versions"]
    rows = [
        _row(name, model, policy, row)
        for name, model in models.items()
        for policy, row in model["rows"].items()
    ]
    template = (TEXTS / f"_{kind}.md").read_text(encoding="utf-8")
    return template.format(
        command=result["command"],
        device=first["device"],
        versions=", ".join(f"{k} {v}" for k, v in versions.items() if k != "numpy"),
        seeds=first["seeds"],
        rows="\n".join(rows),
        goals=_goals(result["goals"]),
    )


def guilty_layers(result: dict[str, Any], kind: str = "guilty_layers") -> str:
    """Returns the section of benchmarks/guilty_layers.py, with what it missed."""
    rows, missed = [], []
    for split in ("develop", "final"):
        found = result[split]
        for dtype, counts in found["sensitivity"].items():
            cells = [f"{right} of {total}" for right, total in counts.values()]
            rows.append(f"| {split} | {dtype} | {' | '.join(cells)} |")
        missed += [_missed(split, row) for row in found["missed"]]
    causes = [
        f"{split}: cause {' of '.join(map(str, found['causes']))}, layer "
        f"{' of '.join(map(str, found['layers']))}"
        for split in ("develop", "final")
        for found in [result[split]["triage"]]
    ]
    template = (TEXTS / f"_{kind}.md").read_text(encoding="utf-8")
    return template.format(
        command=result["command"],
        versions=", ".join(f"{k} {v}" for k, v in result["versions"].items()),
        seeds=result["seeds"],
        rows="\n".join(rows),
        triage="; ".join(causes),
        missed="\n".join(missed) or "None.",
    )


def equal_policies(result: dict[str, Any], kind: str = "equal_policies") -> str:
    """Returns the section of benchmarks/verdict_rates.py with `--real`."""
    words = ("same", "as good", "unclear", "better", "worse")
    rows = [
        f"| {name} | {' | '.join(str(counts.get(word, 0)) for word in words)} |"
        for name, counts in result["measures"].items()
    ]
    told = [
        f"report {each['report']} ({each['kind']}): "
        + ", ".join(f"{name} {effect}" for name, effect in each["measures"].items())
        for each in result["told_apart"]
    ]
    return _filled(
        kind,
        result,
        rows,
        command=result["command"],
        reports=result["reports"],
        seeds=result["seeds"],
        policies=" and ".join(result["policies"]),
        apart=f"{len(told)} of {result['reports']}",
        rate=f"{result['rate']:.1%}",
        told=f" In {'; in '.join(told)}." if told else "",
        answers=", ".join(f"{n} {answer}" for answer, n in result["answers"].items()),
    )


def guards(result: dict[str, Any], kind: str = "guards") -> str:
    """Returns the section of benchmarks/guards.py."""
    rows = []
    for case, found in result["cases"].items():
        cells = [case, f"{found['parameters']:,}", f"{found['step_milliseconds']} ms"]
        for name in ("FlightRecorder", "NanRecovery", "both"):
            own = found[name]
            low, high = own["interval"]
            cells.append(f"{own['ratio']:.3f} [{low:.3f}, {high:.3f}]")
        cells.append(f"{found['both']['processor']['ratio']:.3f}")
        rows.append(f"| {' | '.join(cells)} |")
    missed = [case for case, found in result["cases"].items() if not found["met"]]
    turns = {found["turns"] for found in result["cases"].values()}
    return _filled(
        kind,
        result,
        rows,
        goal=result["goal"],
        turns=" or ".join(map(str, sorted(turns))),
        missed=f"Above it: {', '.join(missed)}." if missed else "All are below it.",
    )


def shadow_pass(result: dict[str, Any], kind: str = "shadow_pass") -> str:
    """Returns the section of benchmarks/shadow_pass.py."""
    rows = [
        f"| {case} | {found['parameters']:,} | {dtype} | {own['seconds']} s | "
        f"{own['slowest']} s | {own['steps']} |"
        for case, found in result["cases"].items()
        for dtype, own in found.items()
        if isinstance(own, dict)
    ]
    return _filled(kind, result, rows, runs=result["runs"], goal=result["goal"])


def freeze(result: dict[str, Any], kind: str = "freeze") -> str:
    """Returns the section of benchmarks/freeze.py."""
    rows, sizes = [], []
    for case, by_size in result["cases"].items():
        before, after = by_size["bytes"].values()
        sizes.append(f"{after / before:.2f} of the bytes in the {case}")
        for size, found in by_size.items():
            if size == "bytes":
                continue
            ratios = [
                f"{own['ratio']:.2f} {own['interval']}"
                for own in found.values()
                if isinstance(own, dict)
            ]
            milliseconds = f"{found['float32_milliseconds']} ms"
            cells = [case, size, milliseconds, *ratios, str(found["goal"] or "")]
            rows.append(f"| {' | '.join(cells)} |")
    return _filled(kind, result, rows, turns=result["turns"], bytes=" and ".join(sizes))


def remat(result: dict[str, Any], kind: str = "remat") -> str:
    """Returns the section of benchmarks/remat.py."""
    rows = [
        f"| {case} | {policy} | {found['batch']} | "
        f"{_mebibytes(found['plain_bytes'])} | {_mebibytes(found['remat_bytes'])} | "
        f"{found['memory']:.2f} | {found['memory_with_glibc']:.2f} | "
        f"{found['time']:.2f} | {found['off']:.1e} |"
        for case, policies in result["cases"].items()
        for policy, found in policies.items()
    ]
    return _filled(kind, result, rows, goal=result["goal"])


def memory(result: dict[str, Any], kind: str = "memory") -> str:
    """Returns the section of benchmarks/memory.py."""
    rows = [
        f"| {case} | {policy} | {found['batch']} | {_mebibytes(found['predicted'])} | "
        f"{_mebibytes(found['measured'][0])} to {_mebibytes(found['measured'][-1])} | "
        f"{found['ratio']:.2f} |"
        for case, policies in result["cases"].items()
        for policy, found in policies.items()
    ]
    return _filled(kind, result, rows, goal=f"{result['goal']:.0%}")


def resident(result: dict[str, Any], kind: str = "resident") -> str:
    """Returns the section of benchmarks/resident.py, with what it missed."""
    rows, missed = [], []
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            cells = [case, policy, str(found["batch"])]
            cells += [_mebibytes(found[key]) for key in ("predicted", "measured")]
            cells += [f"{found[key]:.2f}" for key in ("ratio", "ratio_above_built")]
            rows.append(f"| {' | '.join(cells)} |")
            missed += [] if found["met"] else [f"{case}, {policy}"]
    allocators = dict.fromkeys(
        found["allocator"]
        for each in result["cases"].values()
        for found in each.values()
    )
    return _filled(
        kind,
        result,
        rows,
        goal=f"{result['goal']:.0%}",
        allocator=" and ".join(allocators),
        steps=result["steps"],
        missed=f"Beyond it: {'; '.join(missed)}." if missed else "All are within it.",
    )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _filled(
    kind: str, result: dict[str, Any], rows: Sequence[str], **texts: Any
) -> str:
    """Returns a template with a table's rows, the device and versions."""
    template = (TEXTS / f"_{kind}.md").read_text(encoding="utf-8")
    return template.format(
        device=result["device"],
        versions=", ".join(f"{k} {v}" for k, v in result["versions"].items()),
        rows="\n".join(rows),
        **texts,
    )


WRITERS = {
    "equal_policies": equal_policies,
    "freeze": freeze,
    "guilty_layers": guilty_layers,
    "guilty_layers_further": guilty_layers,
    "guards": guards,
    "memory": memory,
    "remat": remat,
    "resident": resident,
    "shadow_pass": shadow_pass,
}


def _missed(split: str, row: dict[str, Any]) -> str:
    where = " ".join(str(row[key]) for key in ("case", "dtype") if key in row)
    return (
        f"- {where}, seed {row['seed']} ({split}): expected {row['expected']} "
        f"{row['wanted']}, got {row['found']} {row['guilty']}"
    )


def _row(name: str, model: dict[str, Any], policy: str, row: dict[str, Any]) -> str:
    is_first = policy == next(iter(model["rows"]))
    label = f"{name}, batch {model['batch_size']}" if is_first else ""
    asked = policy if row["resolved"] in policy else f"{policy} = {row['resolved']}"
    cells = [
        label,
        asked,
        f"{row['examples_per_second']:,.0f}",
        ratio_text(row.get("ratio"), "reference"),
        ratio_text(row.get("over_stock"), ""),
        ratio_text(row.get("training_bytes"), ""),
        ratio_text(row.get("latency"), ""),
        f"{model['metric']} {row['metric']:.4f}",
        row.get("answer", ""),
    ]
    return f"| {' | '.join(cells)} |"


def ratio_text(interval: Sequence[Any] | None, other: str = "") -> str:
    """Returns a ratio with its interval, or another text where there is none."""
    if interval is None:
        return other
    middle, low, high = interval
    if low is None or high is None:
        return f"{middle:.2f}"
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _goals(goals: dict[str, dict[str, Any]]) -> str:
    """Returns a sentence for each goal, with what missed it."""
    sentences = []
    for policy, what in (("auto", '"auto"'), ("mixed_bfloat16", "Our mixed_bfloat16")):
        each = {name: found[policy] for name, found in goals.items() if policy in found}
        if not each:
            continue
        least = next(iter(each.values()))["goal"]
        met = [name for name, found in each.items() if found["met"]]
        missed = [name for name, found in each.items() if not found["met"]]
        text = f"{what} was to reach {least} of stock mixed_bfloat16 on each model. "
        text += f"Met: {', '.join(met) or 'none'}."
        for name in missed:
            found = each[name]
            is_noise = "" if found["ruled_out"] else ", which the noise allows"
            text += f" {name}: {ratio_text(found['ratio'], '')}{is_noise}."
        sentences.append(text)
    return "\n\n".join(sentences)


def main(argv: Sequence[str]) -> int:
    """Writes the file and prints its path."""
    settings = flags.FlagValues()
    flags.DEFINE_string(
        "output", str(FOLDER / "RESULTS.md"), "File.", flag_values=settings
    )
    settings(argv)
    text = "\n".join(
        [(TEXTS / "_head.md").read_text(encoding="utf-8"), *sections(TEXTS)]
    )
    Path(settings.output).write_text(text, encoding="utf-8")
    print(settings.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
