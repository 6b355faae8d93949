"""Programs in the manner of Keras's examples, one file for each field."""

from tests.wild.programs import (  # noqa: F401 - each registers its programs
    loops,
    nlp,
    others,
    structured,
    vision,
)
