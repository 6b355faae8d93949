"""A plain server as examples of FastAPI have it: `... EXPORTED PORT`."""

import sys

import fastapi
import numpy as np
import pydantic
import uvicorn

from tfamp import load_exported

app = fastapi.FastAPI()
model = None


class Tensor(pydantic.BaseModel):
    """An input or output."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class Asked(pydantic.BaseModel):
    """The body of a request."""

    inputs: list[Tensor]


@app.get("/v2/models/model")
def about() -> dict[str, list[dict[str, object]]]:
    """Tells what the model takes."""
    (spec,) = model.signature.inputs
    return {"inputs": [{"name": spec.name, "datatype": "FP32", "shape": [-1, 64]}]}


@app.post("/v2/models/model/infer")
def predict(asked: Asked) -> dict[str, list[Tensor]]:
    """Answers a batch."""
    (given,) = asked.inputs
    x = np.array(given.data, "float32").reshape(given.shape)
    y = model.predict(x)
    shape, data = list(y.shape), y.ravel().tolist()
    return {"outputs": [Tensor(name="y", datatype="FP32", shape=shape, data=data)]}


if __name__ == "__main__":
    model = load_exported(sys.argv[1])
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
