"""What a command is pointed to: a function, a saved model, or a script up to `fit`."""

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
from collections.abc import Callable
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
    """Returns a target that can be there, or raises; imports nothing."""
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
    """Returns the function that builds what "module:function" or a script names."""
    if text.endswith(".py"):
        return functools.partial(first_fit, text, **how)
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise ValueError(
            f"`build_model` is {text!r}; expected 'module:function', such as "
            "'recipes.train_digits:build', or 'script.py'."
        )
    here = os.getcwd()
    sys.path[:0] = [here] * (here not in sys.path)
    sys.path.append(os.path.join(here, *module_name.split(".")[:-1]))
    module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if inspect.isroutine(value)]
        guess = checks.did_you_mean(name, names)
        advice = f"Did you mean {guess!r}?" if guess else f"It has {tuple(names)!r}."
        raise ValueError(f"Module {module_name!r} has no function {name!r}. {advice}")
    return found


class _Fit(BaseException):
    """Ends a script at its first `fit`; no `except Exception` of its own holds it."""


def first_fit(
    path: str,
    *,
    seed: int = 0,
    compared_epochs: int | None = None,
    own_policy: bool = False,
    shuffled: bool = True,
) -> tuple[Any, Any, Any]:
    """Runs a script up to its first `fit`, and returns its model, data and validation.

    Data are None where it ends without training. `seed` is added to the seeds that it
    sets; without `own_policy` the policy that it sets is left out; `shuffled` batches
    of its arrays are as those of `fit`. It warns of what of that call is left out, of
    `epochs` too where a comparison has others. A `ProgramError` says that it failed.
    """
    import keras
    import tensorflow as tf

    import tfamp

    names: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def instead(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def stop(model: Any, *args: Any, **kwargs: Any) -> Any:
                given = inspect.signature(original).bind(model, *args, **kwargs)
                raise _Fit(model, given.arguments)

            return stop

        def shifted(original: Callable[[int], Any]) -> Callable[[int], Any]:
            return lambda given: original(given + seed)

        for name in ("fit", "train_on_batch"):
            instead(keras.Model, name, stopping(getattr(keras.Model, name)))
        for module, name in ((keras.utils, "set_random_seed"), (tf.random, "set_seed")):
            instead(module, name, shifted(getattr(module, name)))
        old = (keras.mixed_precision, tf.keras.mixed_precision)
        setters = [(tfamp, "enable"), (keras.config, "set_dtype_policy")]
        setters += [(each, "set_global_policy") for each in old]
        setters += [(each, "set_dtype_policy") for each in old]
        for module, name in [] if own_policy else setters:
            instead(module, name, lambda *args, **kwargs: tfamp.status())
        # It sees its own command line, and its folder first among modules.
        folder = os.path.dirname(os.path.realpath(path))
        instead(sys, "argv", [path])
        instead(sys, "path", [folder, *sys.path])
        try:
            names = runpy.run_path(path, run_name="__main__")
        except _Fit as found:
            model, given = found.args
            if compared_epochs not in (None, asked := given.get("epochs", 1)):
                warnings.warn(
                    f"The script's `fit` asks for epochs={asked}; it is compared after "
                    f"{compared_epochs}. Pass --epochs={asked} for as many.",
                    UserWarning,
                    stacklevel=2,
                )
            return model, *_data(given, shuffled)
        except (Exception, SystemExit) as error:
            if not isinstance(error, SystemExit) or error.code:
                traceback.print_exception(error.with_traceback(own_frames(error)))
                raise ProgramError(
                    f"{path!r} failed before its first `fit`: "
                    f"{checks.short_error(error)}. Expected a program that `python "
                    f"{path}` runs. Mend what the traceback shows."
                ) from None
    models = [each for each in names.values() if isinstance(each, keras.Model)]
    if not models:
        raise ValueError(
            f"{path!r} ended without `fit`, and no Keras model was found in it; "
            "expected one to look at. Name a function that returns it: 'module:build'."
        )
    return max(models, key=lambda model: model.compiled), None, None


def _data(given: dict[str, Any], shuffled: bool) -> tuple[Any, Any]:
    """Returns the training and validation data of a call of `fit`."""
    import tensorflow as tf

    from tfamp.stepping.arguments import arrays_of, dataset_of

    x, y = given.get("x"), given.get("y")
    if given.get("class_weight") is not None:
        what = "`class_weight` of the script's `fit` is left out here."
        warnings.warn(what, UserWarning, stacklevel=2)
    validation, size = given.get("validation_data"), given.get("batch_size")
    if isinstance(validation, tf.data.Dataset) and given.get("validation_steps"):
        validation = validation.take(given["validation_steps"])
    if y is None:
        if isinstance(x, tf.data.Dataset) and given.get("steps_per_epoch"):
            x = x.take(given["steps_per_epoch"])
        return x if arrays_of(x, needs_targets=False) is None else (x,), validation
    weights = given.get("sample_weight")
    train: Any = arrays_of((x, y) if weights is None else (x, y, weights))
    if part := given.get("validation_split"):
        count = int(len(tf.nest.flatten(train)[0]) * (1.0 - part))
        validation = tf.nest.map_structure(lambda each: each[count:], train)
        train = tf.nest.map_structure(lambda each: each[:count], train)
    if size is None:
        return train, validation
    if arrays_of(validation) is not None:
        validation = dataset_of(validation, size)
    dataset = tf.data.Dataset.from_tensor_slices(train)
    dataset = dataset.shuffle(_SHUFFLED) if shuffled else dataset
    return dataset.batch(size), validation


def own_frames(error: BaseException) -> types.TracebackType | None:
    """Returns an error's traceback from the user's first frame on."""
    ours, trace = os.path.dirname(os.path.dirname(__file__)), error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not (file.startswith(ours) or "runpy" in file):
            break
        trace = trace.tb_next
    return trace
