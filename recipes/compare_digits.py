"""Shows in a few minutes what mixed precision brings on this machine: `make train`.

Trains the network of train_digits.py in float32, in float32 with XLA, and in the half
precision that suits the machine best, each with several seeds and in fresh processes.
Data: scikit-learn's 1,797 digits (8x8, uint8), a fifth for test; no network needed.
Command: python recipes/compare_digits.py
         python recipes/compare_digits.py --policies=float32,keras:mixed_bfloat16
         tfamp compare recipes.train_digits:build --epochs=20   (the same by a command)
Time: 3 to 5 minutes on 2 CPU cores; 10 if they have no bfloat16 instructions.
Expect: the same accuracy everywhere, a verdict, report.html, and the picture speed.png.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from absl import app, flags

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_list("policies", None, "What to compare; else what suits the machine.")
flags.DEFINE_integer("seeds", 4, "Trainings under each policy.")
flags.DEFINE_integer("epochs", 10, "Passes over the data of a training.")
flags.DEFINE_string("out", None, "New folder for report and picture.")
flags.DEFINE_boolean("smoke", False, "One epoch of one seed and two policies.")

GAIN = """\
Half precision gains on GPUs with tensor cores: float16 from V100 and T4 on, bfloat16
from A100, A10 and L4 on; and on CPUs with AMX, such as Intel Xeons from Sapphire
Rapids on. A model as small as this one leaves most of a GPU idle."""


@contextlib.contextmanager
def without_notices():
    """Keeps from the terminal what TensorFlow writes while it looks for devices."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def choose() -> tuple[list[str], str]:
    """Returns policies for this machine, and what "auto" is here and why."""
    with tfamp.scope("auto"):
        status = tfamp.status()
    half = status.policy
    if half == "float32":
        # What gains nothing here, but runs: CPUs are far slower yet in float16.
        has_gpu = any(device.kind == "gpu" for device in status.devices)
        half = "mixed_float16" if has_gpu else "mixed_bfloat16"
    return ["float32", "float32+xla", half], f"{status.policy}, as {status.reason}"


def draw(found: "tfamp.Comparison", path: Path) -> None:
    """Draws speed and accuracy of every training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    speed, quality = figure.subplots(1, 2)
    labels: list[str] = []
    for row, policy in enumerate(found.policies):
        runs = found.finished(policy)
        rates = [run.examples_per_second for run in runs]
        scores = [run.final_metrics[found.metric] for run in runs]
        speed.barh(row, sum(rates) / len(rates), color=f"C{row}", alpha=0.35)
        for panel, values in ((speed, rates), (quality, scores)):
            panel.plot(values, [row] * len(values), "o", color=f"C{row}", alpha=0.8)
        ratio = found.ratio("examples_per_second", policy, "float32").estimate
        is_first = policy == "float32"
        labels.append(policy if is_first else f"{policy}\n{ratio:.2f} times float32")
    for panel, name in ((speed, "examples a second"), (quality, found.metric)):
        panel.set(xlabel=f"{name}, a dot for each seed", ylim=(row + 0.6, -0.6))
        panel.set_yticks(range(len(labels)), labels)
        panel.locator_params(axis="x", nbins=5)
        panel.spines[["top", "right"]].set_visible(False)
    speed.set_xlim(left=0)
    quality.tick_params(labelleft=False)
    figure.suptitle(f"{found.title}: {found.verdict}")
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    """Compares, writes report and picture, and ends with a line of JSON."""
    with without_notices():
        policies, here = choose()
    policies = FLAGS.policies or (policies[::2] if FLAGS.smoke else policies)
    seeds, epochs = (1, 1) if FLAGS.smoke else (FLAGS.seeds, FLAGS.epochs)
    out = Path(FLAGS.out or time.strftime("reports/digits-%Y%m%d-%H%M%S")).resolve()
    print(f"Best policy by the table of devices: {here}")
    print(f"Training {seeds} times under each of {', '.join(policies)}.", flush=True)
    started, done, total = time.monotonic(), 0, len(policies) * seeds

    def show(run):
        nonlocal done
        done += 1
        left = (time.monotonic() - started) / done * (total - done)
        result = run.error or f"{run.examples_per_second:,.0f} examples/s"
        if not sys.stderr.isatty():  # where no bar shows it
            line = f"{run.policy}, seed {run.seed}: {result} ({left:.0f} s left)"
            print(f"[{done}/{total}] {line}", flush=True)

    if "__file__" in globals():  # a notebook is opened where `recipes` is found
        os.chdir(Path(__file__).resolve().parents[1])
    found = tfamp.compare(
        "recipes.train_digits:build",
        policies=policies,
        seeds=seeds,
        epochs=epochs,
        tolerance=0.02,  # less is more than 360 test images can show
        directory=out / "runs",
        on_run=show,
    )
    found.to_html(out / "report.html")
    draw(found, out / "speed.png")
    print(found)
    for policy in policies[1:]:
        ratio = found.ratio("examples_per_second", policy, "float32")
        word = (
            "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "not clear"
        )
        span = f"{ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        print(f"Here {policy} trains {span} times as fast as float32: {word}.")
    if found.verdict != "equivalent and faster":
        print(GAIN)
    print(f"Report: {out / 'report.html'}\nPicture: {out / 'speed.png'}")
    ratios = {p: found.ratio("examples_per_second", p).estimate for p in policies}
    print(json.dumps({"policy": found.best, "verdict": found.verdict, **ratios}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
