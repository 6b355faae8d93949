"""`tfamp serve` and `tfamp bench_serve`: models over HTTP, and how fast they answer.

Nothing here loads TensorFlow: a server of other runtimes does without it.
"""

from pathlib import Path

from tfamp.cli._flags import Call, Command, Flag, Outcome, one_of
from tfamp.records.checks import positive

_STATUS = "Ends with status 0 if done, 1 if not, 2 if called wrongly."
_TOKEN = Flag(
    *("token_file", "string", None),
    "File with the token that requests bear; else they bear none.",
)
_TIMEOUT = Flag("timeout_seconds", "float", 10.0, "The most that an answer may take.")


def _bench(call: Call) -> Outcome:
    from tfamp.serving.load_test.bench import bench_serve
    from tfamp.serving.load_test.report import to_html

    values = call.values
    path = values["token_file"]
    names = ("rates", "seconds", "protocol", "batch_size", "timeout_seconds", "seed")
    found = bench_serve(
        call.arguments,
        token=None if path is None else Path(path).read_text(encoding="utf-8").strip(),
        **{name: values[name] for name in names},
    )
    text = found.table()
    if values["out"] is not None:
        to_html(found, values["out"])
        text += f"\nReport: {values['out']}"
    return Outcome(found, text)


def _rates(name: str, text: str) -> list[float]:
    try:
        return [positive(name, float(word)) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`{name}` is {text!r}; expected numbers above 0 with commas between. "
            "Write for example 100,500,1000"
        ) from None


BENCH = Command(
    "bench_serve",
    "Asks models of servers, such as http://127.0.0.1:8000/v2/models/digits, at given "
    "rates, and prints latencies, what was answered, and errors. Requests do not wait "
    "for answers, and latencies count from the moment that each was due. Several are "
    "asked in turns. Works with every server of the Open Inference Protocol v2.\n\n"
    f"{_STATUS}",
    _bench,
    (
        Flag(
            *("rates", _rates, None),
            "Requests a second, separated by commas; else 10 % to 90 % of the most "
            "that 16 clients get from the first server.",
        ),
        Flag("seconds", "float", 5.0, "How long each rate lasts."),
        Flag(
            *("protocol", one_of("binary", "json", "predict"), "binary"),
            "binary or json of the Open Inference Protocol, or predict of TensorFlow "
            "Serving.",
        ),
        Flag(
            *("batch_size", "integer", 1, "Examples in each request."),
            {"lower_bound": 1},
        ),
        _TIMEOUT,
        _TOKEN,
        Flag("seed", "integer", 0, "Of the moments at which requests are due."),
        Flag("out", "string", None, "HTML file that gets the curves."),
    ),
    "url...",
)
COMMANDS = {"bench_serve": BENCH}
