"""`tfamp serve` and `tfamp bench_serve`: models over HTTP, and how fast they answer.

Nothing here loads TensorFlow: a server of other runtimes does without it.
"""

from pathlib import Path

from tfamp.cli.command import Call, Command, Flag, Outcome, one_of
from tfamp.records.checks import positive
from tfamp.records.units import parse_bytes

_STATUS = "Ends with status 0 if done, 1 if not, 2 if called wrongly."


def _serve(call: Call) -> Outcome:
    from tfamp.serving.server.main import serve

    def say(address: str) -> None:
        print(f"Serving at {address}; Ctrl-C or SIGTERM ends it.", flush=True)

    return Outcome(serve(call.arguments, on_start=say, **call.given))


def _bench(call: Call) -> Outcome:
    from tfamp.serving.load_test.bench import bench_serve
    from tfamp.serving.load_test.result import to_html

    path, out = call.values["token_file"], call.values["out"]
    token = None if path is None else Path(path).read_text(encoding="utf-8").strip()
    found = bench_serve(call.arguments, token=token, **call.given)
    text = found.table()
    if out is not None:
        to_html(found, out)
        text += f"\nReport: {out}"
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
    "tfamp.serving.server.main.serve",
    _serve,
    (
        Flag("port", "integer", 8000, "Port to listen at; 0 takes a free one."),
        Flag(
            "max_body", parse_bytes, 64 * 2**20, "The largest request, such as 64MiB."
        ),
    ),
    without=("load", "on_start"),
    purpose="Answers for models that `tfamp.export` wrote, over HTTP: by the Open "
    "Inference Protocol v2, as Triton and KServe do, at /v2/models/NAME/infer, and as "
    "TensorFlow Serving does at /v1/models/NAME:predict. A path is an exported folder "
    "or one of numbered versions; name=path names the model. Metrics for Prometheus "
    "are at /metrics.",
    more=_STATUS,
    argument="path...",
)
BENCH = Command(
    "bench_serve",
    "tfamp.serving.load_test.bench.bench_serve",
    _bench,
    (
        Flag(
            *("rates", _rates, None),
            "Requests a second, separated by commas; else 10 % to 90 % of the most "
            "that 16 clients get from the first server.",
        ),
        Flag(
            *("protocol", one_of("binary", "json", "predict"), None),
            "binary or json of the Open Inference Protocol, or predict of TensorFlow "
            "Serving; else binary at /v2 and predict at /v1.",
        ),
        Flag(
            *("token_file", "string", None),
            "File with the token that requests bear; else they bear none.",
        ),
        Flag("seed", "integer", 0, "Of the moments at which requests are due."),
        Flag("out", "string", None, "HTML file that gets the curves."),
    ),
    without=("token",),
    purpose="Asks models of servers, such as http://127.0.0.1:8000/v2/models/digits, "
    "at given rates, and prints latencies, what was answered, and errors. Requests do "
    "not wait for answers, and latencies count from the moment that each was due. "
    "Several are asked in turns. Works with every server of the Open Inference "
    "Protocol v2, and at /v1/models/NAME with those of TensorFlow Serving's REST.",
    more=_STATUS,
    argument="url...",
)
COMMANDS = {"serve": SERVE, "bench_serve": BENCH}
