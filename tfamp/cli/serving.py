"""`tfamp serve` and `tfamp bench_serve`: models over HTTP, and how fast they answer.

Nothing here loads TensorFlow: a server of other runtimes does without it.
"""

from pathlib import Path

from tfamp.cli._flags import Call, Command, Flag, Outcome, one_of
from tfamp.records.checks import positive
from tfamp.records.units import parse_bytes


def _count(name: str, default: int | None, help: str) -> Flag:
    return Flag(name, "integer", default, help, {"lower_bound": 1})


_STATUS = "Ends with status 0 if done, 1 if not, 2 if called wrongly."
_TOKEN = Flag(
    *("token_file", "string", None),
    "File with the token that requests bear; else they bear none.",
)
_TIMEOUT = Flag("timeout_seconds", "float", 10.0, "The most that an answer may take.")


def _serve(call: Call) -> Outcome:
    from tfamp.serving.server.main import serve

    def say(address: str) -> None:
        print(f"Serving at {address}; Ctrl-C or SIGTERM ends it.", flush=True)

    names = (flag.name for flag in SERVE.flags)
    given = {name: call.values[name] for name in names}
    return Outcome(serve(call.arguments, on_start=say, **given))


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


SERVE = Command(
    "serve",
    "Answers for models that `tfamp.export` wrote, over HTTP: by the Open Inference "
    "Protocol v2, as Triton and KServe do, at /v2/models/NAME/infer, and as TensorFlow "
    "Serving does at /v1/models/NAME:predict. A path is an exported folder or one of "
    "numbered versions; name=path names the model. Metrics for Prometheus are at "
    f"/metrics.\n\n{_STATUS}",
    _serve,
    (
        Flag("host", "string", "127.0.0.1", "Address to listen at; 0.0.0.0 for all."),
        Flag("port", "integer", 8000, "Port to listen at; 0 takes a free one."),
        _count("threads", None, "Threads of a run of a model; else as many as cores."),
        _count(
            *("max_batch_size", None),
            "Examples in a run; else 64, or 1 where answers depend on their batch.",
        ),
        _count("max_queue", 256, "Requests of a model that may wait."),
        Flag(
            "max_body", parse_bytes, 64 * 2**20, "The largest request, such as 64MiB."
        ),
        _TIMEOUT,
        Flag(
            *("reload_seconds", "float", 2.0),
            "How often to look for changed models; 0 never does.",
        ),
        _TOKEN,
    ),
    "path...",
)
BENCH = Command(
    "bench_serve",
    "Asks models of servers, such as http://127.0.0.1:8000/v2/models/digits, at given "
    "rates, and prints latencies, what was answered, and errors. Requests do not wait "
    "for answers, and latencies count from the moment that each was due. Several are "
    "asked in turns. Works with every server of the Open Inference Protocol v2, and at "
    "/v1/models/NAME with those of TensorFlow Serving's REST.\n\n"
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
            *("protocol", one_of("binary", "json", "predict"), None),
            "binary or json of the Open Inference Protocol, or predict of TensorFlow "
            "Serving; else binary at /v2 and predict at /v1.",
        ),
        _count("batch_size", 1, "Examples in each request."),
        _TIMEOUT,
        _TOKEN,
        Flag("seed", "integer", 0, "Of the moments at which requests are due."),
        Flag("out", "string", None, "HTML file that gets the curves."),
    ),
    "url...",
)
COMMANDS = {"serve": SERVE, "bench_serve": BENCH}
