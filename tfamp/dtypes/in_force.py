"""Which settings new layers come under: the process's, or those of a block.

`enable` acts on the whole process. A `scope`, and the loading of a file, act on the
thread or task that runs their block, so two threads never see each other's. Keras's own
global policy is kept to what is in force in each thread.
"""

import contextlib
import contextvars
import dataclasses
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import layers

NOT_ENABLED = "tfamp is not enabled"


@dataclasses.dataclass
class Setting:
    """What new layers come under, and what comes back afterwards."""

    # The settings of managed layers, None where they are left to Keras.
    settings: PolicySettings | None = None
    why: str = NOT_ENABLED  # why the policy was chosen
    # Keras's policy, as the user had set it.
    policy_before: keras.DTypePolicy | None = None
    # The policy of the saved model that is being loaded, whose layers are made under
    # the settings instead, or else in float32.
    loaded: str | None = None
    # The thread whose Keras policy is that of the settings all the time.
    thread: int = 0


_BLOCKS: contextvars.ContextVar[tuple[Setting, ...]] = contextvars.ContextVar(
    "tfamp_blocks", default=()
)


class InForce:
    """The setting of the process and those of the blocks that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._everywhere = Setting()
        self._num_blocks = 0

    @property
    def present(self) -> Setting:
        """The setting that holds here: of the innermost block, or the process's."""
        blocks = _BLOCKS.get()
        return blocks[-1] if blocks else self._everywhere

    @property
    def settings(self) -> PolicySettings | None:
        """The settings that new layers come under here."""
        return self.present.settings

    @property
    def is_used(self) -> bool:
        """Whether any thread may make managed layers."""
        return self._everywhere.settings is not None or self._num_blocks > 0

    @property
    def owns_thread(self) -> bool:
        """Whether the present setting was made in this thread."""
        return self.present.thread == threading.get_ident()

    def put(self, settings: PolicySettings | None, why: str) -> None:
        """Changes the setting that holds here."""
        present = self.present
        present.settings, present.why = settings, why
        present.thread = threading.get_ident()

    @contextlib.contextmanager
    def block(self, **changes: Any) -> Iterator[None]:
        """Gives the block a setting of its own: the present one with `changes`."""
        thread = threading.get_ident()
        own = dataclasses.replace(self.present, **changes, thread=thread)
        before = _BLOCKS.get()
        with self._lock:
            self._num_blocks += 1
        _BLOCKS.set((*before, own))
        try:
            yield
        finally:
            _BLOCKS.set(before)
            with self._lock:
                self._num_blocks -= 1


IN_FORCE = InForce()


_warned_policies: set[str] = set()


@contextlib.contextmanager
def policy_in_force() -> Iterator[None]:
    """Has Keras's global policy be the one in force inside the block.

    `keras.utils.clear_session()` resets it, and a new thread starts without it. The
    thread that enabled tfamp keeps it; another one would not hear of `disable`.
    """
    settings = IN_FORCE.settings
    if settings is None or layers.is_marked(settings):
        yield
        return
    before = layers.present_policy()
    layers.mark(settings, settings.policy)
    try:
        yield
    finally:
        if not IN_FORCE.owns_thread:
            layers.mark(None, before)


def restore_thread(before: keras.DTypePolicy | None) -> None:
    """Gives this thread the policy in force after a block, or the one of before."""
    settings = IN_FORCE.settings
    if settings is not None and IN_FORCE.owns_thread:
        layers.mark(settings, settings.policy)
    else:
        layers.mark(None, before)


def is_in_force(policy: str) -> bool:
    """States whether new layers come under the policy of this name."""
    settings = IN_FORCE.settings
    if settings is None:
        return False
    return policy in (settings.policy.name, IN_FORCE.present.loaded)


def warn_of_foreign_policy(policy: keras.DTypePolicy | None) -> None:
    """Warns once of a policy that other code set while tfamp was enabled."""
    name = "float32" if policy is None else policy.name
    if name in _warned_policies:
        return
    _warned_policies.add(name)
    warnings.warn(
        f"Keras's global policy was set to {name!r} by other code while tfamp was "
        "enabled, so new layers take it and tfamp's rules do not act on them. Call "
        "`tfamp.enable(...)` again, or use `tfamp.scope(...)` instead of "
        "`keras.config.set_dtype_policy`.",
        UserWarning,
        stacklevel=4,
    )


def forget_warnings() -> None:
    """Lets each warning be given once more, as after `enable`."""
    _warned_policies.clear()
