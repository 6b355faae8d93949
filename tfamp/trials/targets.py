"""What a command is pointed to: a function, a plain script, or a saved model.

Scripts run unchanged, up to their first `fit`: its model and its data are what tools
are asked about.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tfamp.records import checks

FORMS = (
    "'script.py', a program as it is; 'module:build', a function that returns (model, "
    "train) or (model, train, validation); or 'model.keras', a saved model"
)
# Of a script's arrays, the examples that are shuffled at a time.
_SHUFFLED = 2**14


class ProgramError(RuntimeError):
    """The user's own program failed; its traceback has been printed."""


def checked(text: str) -> str:
    """Returns a target that can be there; imports nothing.

    Raises:
        ValueError: It has none of the forms, or there is no such file or module.
    """
    module, colon, name = text.partition(":")
    if text.endswith((".py", ".keras")) or os.path.sep in text:
        if os.path.exists(text):
            return text
        raise ValueError(f"There is no file {text!r}; expected {FORMS}. Check the path")
    if not (module and colon and name.isidentifier()):
        raise ValueError(f"{text!r} is nothing to look at; expected {FORMS}")
    first = module.split(".")[0]
    is_here = os.path.exists(first) or os.path.isfile(f"{first}.py")
    if not is_here and importlib.util.find_spec(first) is None:
        raise ValueError(
            f"There is no module {first!r} for {text!r}; expected one below "
            f"{os.getcwd()!r} or an installed one. Run from the folder it lies in"
        )
    return text


def load(text: str, **how: Any) -> Callable[..., Any]:
    """Returns the function that builds what a target names.

    It is "module:function", whose module may import its neighbours, or a script; `how`
    is for `first_fit`.
    """
    if text.endswith(".py"):
        return functools.partial(first_fit, text, **how)
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ValueError(
            f"`build_model` is {text!r}; expected 'module:function', such as "
            "'recipes.train_digits:build', or 'script.py'."
        )
    where = os.getcwd()
    neighbours = os.path.join(where, *module_name.split(".")[:-1])
    if where not in sys.path:
        sys.path.insert(0, where)
    if neighbours not in sys.path:
        sys.path.append(neighbours)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ImportError(
                f"There is no module {error.name!r} for {text!r}; expected one below "
                f"{where!r} or an installed one. Run from the folder it lies in.",
                name=error.name,
            ) from error
        raise
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if inspect.isroutine(value)]
        guess = checks.did_you_mean(name, names)
        advice = f"Did you mean {guess!r}?" if guess else f"It has {tuple(names)!r}."
        raise ValueError(f"Module {module_name!r} has no function {name!r}. {advice}")
    return found


class _Fit(BaseException):
    """Ends a script at its first `fit`; no `except Exception` of its own holds it."""

    def __init__(self, model: Any, given: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.given = model, given


def first_fit(
    path: str,
    *,
    seed: int = 0,
    own_policy: bool = False,
    shuffled: bool = True,
) -> tuple[Any, Any, Any]:
    """Runs a script up to its first `fit` or `train_on_batch`.

    Args:
        path: The script.
        seed: Added to the seeds that it sets.
        own_policy: Whether it may set the policy; else what it sets is left out, and
            it computes under what is in force.
        shuffled: Whether batches of its arrays are shuffled, as `fit` does.

    Returns:
        Model, training data and validation data; data are None where the script ends
        without training, and its compiled model was found by its name.

    Raises:
        ProgramError: The script fails; its traceback is printed.
        ValueError: It makes no Keras model.
    """
    import keras

    def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stop(model: Any, *args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(model, *args, **kwargs).arguments
            raise _Fit(model, given)

        return stop

    trained = ("fit", "train_on_batch")
    stops: dict[str, Any] = {
        name: stopping(getattr(keras.Model, name)) for name in trained
    }
    with (
        mock.patch.multiple(keras.Model, **stops),
        _seeds_shifted(seed),
        contextlib.nullcontext() if own_policy else _policy_left_alone(),
        _as_main(path),
    ):
        try:
            names = runpy.run_path(path, run_name="__main__")
        except _Fit as found:
            return found.model, *_data(found.given, shuffled)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not error.code:
                names = {}
            else:
                traceback.print_exception(error.with_traceback(own_frames(error)))
                raise ProgramError(
                    f"{path!r} failed before its first `fit`: "
                    f"{checks.short_error(error)}. Expected a program that `python "
                    f"{path}` runs. Mend what the traceback shows."
                ) from None
    models = [each for each in names.values() if isinstance(each, keras.Model)]
    models.sort(key=lambda model: model.compiled)
    if not models:
        raise ValueError(
            f"{path!r} ended without `fit`, and no Keras model was found in it; "
            "expected one to look at. Name a function that returns it: 'module:build'."
        )
    return models[-1], None, None


def _data(given: dict[str, Any], shuffled: bool) -> tuple[Any, Any]:
    """Returns the training and validation data of a call of `fit`."""
    import tensorflow as tf

    from tfamp.stepping.arguments import arrays_of, dataset_of

    x, y = given.get("x"), given.get("y")
    if given.get("class_weight") is not None:
        warnings.warn(
            "`class_weight` of the script's `fit` is left out here.",
            UserWarning,
            stacklevel=2,
        )
    validation, size = given.get("validation_data"), given.get("batch_size")
    if y is None:
        if isinstance(validation, tf.data.Dataset) and given.get("validation_steps"):
            validation = validation.take(given["validation_steps"])
        if isinstance(x, tf.data.Dataset) and given.get("steps_per_epoch"):
            x = x.take(given["steps_per_epoch"])
        data = x if arrays_of(x, needs_targets=False) is None else (x,)
        return data, validation
    weights = given.get("sample_weight")
    train: Any = (x, y) if weights is None else (x, y, weights)
    train = arrays_of(train)
    if part := given.get("validation_split"):
        count = int(len(tf.nest.flatten(train)[0]) * (1.0 - part))
        validation = tf.nest.map_structure(lambda each: each[count:], train)
        train = tf.nest.map_structure(lambda each: each[:count], train)
    if size is None:
        return train, validation
    if arrays_of(validation) is not None:
        validation = dataset_of(validation, size)
    dataset = tf.data.Dataset.from_tensor_slices(train)
    if shuffled:
        dataset = dataset.shuffle(_SHUFFLED)
    return dataset.batch(size), validation


@contextlib.contextmanager
def _as_main(path: str) -> Iterator[None]:
    """Has a script see its own command line, and its folder first among modules."""
    folder = os.path.dirname(os.path.realpath(path))
    with (
        mock.patch.object(sys, "argv", [path]),
        mock.patch.object(sys, "path", [folder, *sys.path]),
    ):
        yield


def own_frames(error: BaseException) -> types.TracebackType | None:
    """Returns an error's traceback from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_ours = file.startswith(os.path.dirname(os.path.dirname(__file__)))
        if not (is_ours or "runpy" in file):
            break
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _seeds_shifted(seed: int) -> Iterator[None]:
    """Adds to the seeds that a script sets, so that each run of it is another one."""
    import keras
    import tensorflow as tf

    def shifted(original: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda given: original(given + seed)

    with (
        mock.patch.object(
            keras.utils, "set_random_seed", shifted(keras.utils.set_random_seed)
        ),
        mock.patch.object(tf.random, "set_seed", shifted(tf.random.set_seed)),
    ):
        yield


@contextlib.contextmanager
def _policy_left_alone() -> Iterator[None]:
    """Has what a script sets as policy change nothing."""
    import keras
    import tensorflow as tf

    import tfamp

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return tfamp.status()

    policies: dict[str, Any] = {"set_dtype_policy": nothing}
    old_names: dict[str, Any] = {
        "set_global_policy": nothing,
        "set_dtype_policy": nothing,
    }
    with (
        mock.patch.object(tfamp, "enable", nothing),
        mock.patch.multiple(keras.config, **policies),
        mock.patch.multiple(keras.mixed_precision, **old_names),
        mock.patch.multiple(tf.keras.mixed_precision, **old_names),
    ):
        yield
