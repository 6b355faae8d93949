r"""Lays an exported model out as NVIDIA Triton takes it: its files, and config.pbtxt.

    python deploy/serving/triton.py exported/digits models
    docker run --rm -p 8000:8000 -v "$PWD/models:/models" \
        nvcr.io/nvidia/tritonserver:25.10-py3 tritonserver --model-repository=/models

The new version is one above those that are there. Clients of `tfamp serve` stay as they
are: names, shapes and dtypes are those of the export.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import tfamp
from tfamp.serving.runtimes.signature import DATATYPES, TensorSpec
from tfamp.serving.server.models import DEFAULT_BATCH_SIZE

# Runtime -> Triton's backend.
BACKENDS = {"onnx": "onnxruntime", "openvino": "openvino"}
ELSEWHERE = {"saved_model": "TensorFlow Serving", "litert": "phones and browsers"}


def config(model: tfamp.LoadedModel, name: str) -> str:
    """Returns config.pbtxt of a model.

    Requests share a run where the answer to one does not depend on the others, as in
    `tfamp serve`.
    """
    signature = model.signature
    specs = (*signature.inputs, *signature.outputs)
    has_batch = all(spec.shape and spec.shape[0] is None for spec in specs)
    joins = has_batch and model.is_by_example
    lines = [
        f"name: {json.dumps(name)}",
        f"backend: {json.dumps(BACKENDS[model.runtime])}",
        f"max_batch_size: {DEFAULT_BATCH_SIZE if joins else 0}",
        *(_tensor("input", spec, joins) for spec in signature.inputs),
        *(_tensor("output", spec, joins) for spec in signature.outputs),
    ]
    if joins:
        lines.append("dynamic_batching { }")
    return "\n".join([*lines, ""])


def _tensor(kind: str, spec: TensorSpec, joins: bool) -> str:
    """Returns an input or output; Triton does not name the batch where it joins."""
    datatype = DATATYPES[spec.dtype].replace("BYTES", "STRING")
    shape = [-1 if length is None else length for length in spec.shape]
    dims, reshape = shape[1:] if joins else shape, ""
    if not dims:  # Triton has no tensors without a length.
        dims, reshape = [1], " reshape { shape: [ ] }"
    return (
        f"{kind} {{ name: {json.dumps(spec.name)} data_type: TYPE_{datatype} "
        f"dims: {dims}{reshape} }}"
    )


def lay_out(exported: Path, repository: Path, name: str) -> Path:
    """Writes a new version of a model into a repository and returns its folder.

    Raises:
        ValueError: Triton has no backend for what runs the export.
    """
    model = tfamp.load_exported(exported)
    if model.runtime not in BACKENDS:
        raise ValueError(
            f"{str(exported)!r} is for {model.runtime!r}, which Triton does not run; "
            f"expected one of {tuple(BACKENDS)}. Take it to "
            f"{ELSEWHERE[model.runtime]}, or export another format."
        )
    place = repository / name
    place.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in place.iterdir() if path.name.isdigit()]
    version = place / str(max(numbers, default=0) + 1)
    # Beside the repository, of which Triton would take it for a model.
    with tempfile.TemporaryDirectory(dir=repository.parent) as scratch:
        written = Path(scratch, "version")
        shutil.copytree(exported, written)
        described = Path(scratch, "config.pbtxt")
        described.write_text(config(model, name), encoding="utf-8")
        os.replace(described, place / "config.pbtxt")
        os.replace(written, version)
    return version


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exported", type=Path, help="a folder of tfamp.export")
    parser.add_argument("repository", type=Path, help="Triton's folder of models")
    parser.add_argument("--name", help="of the model; else the exported folder's")
    given = parser.parse_args(arguments)
    name = given.name or given.exported.resolve().name
    print(lay_out(given.exported, given.repository, name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
