"""Exports the reference's trained model to other runtimes, in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

from tfamp.comparison.exported_models import FILE, ExportedModel, Exports
from tfamp.serving.exports.choosing import advice
from tfamp.serving.exports.request import named
from tfamp.trials import processes, storage
from tfamp.trials.job import Job
from tfamp.trials.run_records import Run

# Why an export is missing that Ctrl-C ended; the comparison itself is done by then.
STOPPED = "stopped by Ctrl-C; `resume` does the rest"
_CHILD = "tfamp.comparison.export_child"


def checked_exports(names: Sequence[str] | str) -> tuple[str, ...]:
    """Returns the names of exports as they are written in full.

    Raises:
        ImportError: A package that one needs is not installed.
        TypeError: One is no text.
        ValueError: One is no export that there is, or stands there twice.
    """
    requests = [named(each) for each in ([names] if isinstance(names, str) else names)]
    found = tuple(request.name for request in requests)
    if len({*found}) < len(found):
        raise ValueError(
            f"`exports` is {found!r}; expected different ones. Name each once."
        )
    if lacking := advice([*dict.fromkeys(request.format for request in requests)]):
        raise ImportError(" ".join(lacking))
    return found


def exported(
    folder: Path,
    job: Job,
    reference: str,
    runs: Sequence[Run],
    names: Sequence[str],
    *,
    tolerance: float,
) -> tuple[ExportedModel, ...]:
    """Exports the reference's model of the first seed, and returns what came of it.

    Those that a comparison that goes on has done already are not done again.

    Args:
        folder: Of the comparison, with the model.
        job: Its settings.
        reference: The policy whose model is exported.
        runs: All of its runs.
        names: Exports, as `checked_exports` returns them.
        tolerance: By how much the metric may be worse.
    """
    policy, seed = reference, job.seeds[0]
    is_there = any(
        (run.policy, run.seed) == (policy, seed) and run.is_finished for run in runs
    )
    if not names or not is_there:
        return ()
    path = folder / FILE
    done = Exports.from_json(path).models if path.is_file() else ()
    kept = {
        each.name: each
        for each in done
        if (each.policy, each.seed, each.error) == (policy, seed, "")
    }
    asked = [name for name in names if name not in kept]
    why = ""
    if asked and not storage.model_of(folder, policy, seed).is_file():
        why = "the trained model is not there any more; compare in another folder"
    elif asked:
        Exports(tuple(kept.values())).to_json(path)
        words = [str(folder), policy, str(seed), repr(tolerance), *asked]
        why = _run(words, folder / "exports.log")
        kept = {each.name: each for each in Exports.from_json(path).models}
    return tuple(
        kept.get(name) or ExportedModel(name, policy, seed, "failed", error=why)
        for name in names
    )


def _run(words: list[str], log: Path) -> str:
    """Runs the process that exports, and returns why it ended if not well."""
    process = processes.start(_CHILD, words, log)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        return STOPPED
    finally:
        processes.close_input(process)
        processes.end(process)
    last = processes.tail(log).splitlines()[-1:]
    return "" if not status else ": ".join([processes.why_ended(status), *last])
