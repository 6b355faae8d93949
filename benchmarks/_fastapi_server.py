"""A plain server as examples of FastAPI have it: `... EXPORTED PORT`."""

import sys

import fastapi
import numpy as np
import pydantic
import uvicorn

from tfamp import load_exported

app = fastapi.FastAPI()
model = None


class Asked(pydantic.BaseModel):
    """The body of a request."""

    instances: list[list[float]]


@app.post("/v1/models/model:predict")
def predict(asked: Asked) -> dict[str, list[list[float]]]:
    """Answers rows."""
    x = np.array(asked.instances, "float32")
    return {"predictions": model.predict(x).tolist()}


if __name__ == "__main__":
    model = load_exported(sys.argv[1])
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
