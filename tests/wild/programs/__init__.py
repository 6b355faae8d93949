"""Programs in the manner of Keras's examples, one file for each field."""

from tests.wild.programs import (  # noqa: F401 - each registers its programs
    generative,
    loops,
    metric,
    nlp,
    others,
    structured,
    timeseries,
    vision,
)
