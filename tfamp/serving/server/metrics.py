"""What the server counts, for Prometheus."""

import prometheus_client as prometheus

# Seconds: from a tenth of a millisecond, what a small model takes, to ten seconds.
_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_EXAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters and histograms by the name of a model, "" where a request names none."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str) -> prometheus.Histogram:
            bounds = _EXAMPLES if name.endswith("examples") else _SECONDS
            return prometheus.Histogram(
                name, text, ["model"], registry=self.registry, buckets=bounds
            )

        self.requests = prometheus.Counter(
            "tfamp_requests",
            "Answers by HTTP status.",
            ["model", "status"],
            registry=self.registry,
        )
        self.seconds = histogram(
            "tfamp_request_seconds", "From the last byte of a request to its answer."
        )
        self.waited = histogram("tfamp_queue_seconds", "Time in the queue.")
        self.run = histogram("tfamp_run_seconds", "Runs of the model.")
        self.examples = histogram("tfamp_batch_examples", "Examples in a run.")
        self.waiting = prometheus.Gauge(
            "tfamp_queue_requests",
            "Requests that wait or are computed.",
            ["model"],
            registry=self.registry,
        )

    def counts(self) -> dict[str, int]:
        """Returns the number of answers by HTTP status."""
        found: dict[str, int] = {}
        for sample in next(iter(self.requests.collect())).samples:
            if sample.name.endswith("_total"):
                status = sample.labels["status"]
                found[status] = found.get(status, 0) + int(sample.value)
        return found
