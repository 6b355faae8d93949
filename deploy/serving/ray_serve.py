"""Serves exported models on Ray Serve, with the protocol and limits of `tfamp serve`.

    serve run deploy.serving.ray_serve:app paths=exported/digits,exported/faces
    curl -d '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2],
        "data": [0.1, 0.2]}]}' http://127.0.0.1:8000/v2/models/digits/infer

Every machine needs the folders under the same paths, tfamp[serve] and the runtime's
extra. A replica takes as many threads as it reserves cores; make the numbers your own.
"""

from collections.abc import Mapping

from ray import serve

from tfamp.serving.server.main import application

THREADS = 1


def app(arguments: Mapping[str, str]) -> serve.Application:
    """Returns the application of Ray Serve.

    Args:
        arguments: "paths": Exported folders with commas between, as `tfamp serve` takes
            them; "replicas": How many processes answer, by default 1.
    """
    paths = arguments["paths"].split(",")
    # Made in each replica: neither a runtime nor its threads travel.
    ingress = serve.ingress(lambda: application(paths, threads=THREADS))()
    deployment = serve.deployment(
        ingress,
        name="exported",
        num_replicas=int(arguments.get("replicas", 1)),
        # The application has a queue of its own, which makes batches of what waits.
        max_ongoing_requests=256,
        ray_actor_options={"num_cpus": THREADS},
        health_check_period_s=10,
    )
    return deployment.bind()
