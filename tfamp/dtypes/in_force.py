"""Which settings new layers come under: the process's, or those of a block.

`enable` acts on the whole process. A `scope`, and the loading of a file, act on the
thread or task that runs their block, so two threads never see each other's. Keras's own
global policy, which every thread has of its own, says what is in force.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import layers
from tfamp.records import checks

NOT_ENABLED = "tfamp is not enabled"


@dataclasses.dataclass
class Setting:
    """What new layers come under."""

    # The settings of managed layers, None where they are left to Keras.
    settings: PolicySettings | None = None
    why: str = NOT_ENABLED  # why the policy was chosen
    # The policy of the saved model that is being loaded, whose layers are made under
    # the settings instead, or else in float32.
    loaded: str | None = None


_BLOCK: contextvars.ContextVar[Setting | None] = contextvars.ContextVar(
    "tfamp_block", default=None
)


class InForce:
    """The setting of the process, and that of the innermost block that is open."""

    def __init__(self) -> None:
        self._everywhere = Setting()
        self._threads: list[layers.GlobalPolicy] = []  # of those that have heard

    @property
    def present(self) -> Setting:
        """The setting that holds here."""
        return _BLOCK.get() or self._everywhere

    @property
    def settings(self) -> PolicySettings | None:
        """The settings that new layers come under here."""
        return self.present.settings

    def put(self, settings: PolicySettings | None, why: str) -> None:
        """Changes the setting that holds here, and Keras's policy in its threads."""
        present = self.present
        present.settings, present.why = settings, why
        if present is self._everywhere:
            is_enabled, known = settings is not None, self._threads
            self._threads = [each for each in known if each.put(is_enabled=is_enabled)]
        self.tell_thread()

    def tell_thread(self) -> None:
        """Has Keras's policy in this thread be the one in force."""
        policy = self._tell_keras()
        if policy is not None and self.present is self._everywhere:
            self._threads = [*self._threads, policy]

    def _tell_keras(self) -> layers.GlobalPolicy | None:
        known, before = layers.policy_in_force(), layers.present_policy()
        before = before if known is None else known.before
        is_enabled = self.settings is not None
        policy = layers.GlobalPolicy(before, self._name) if is_enabled else None
        layers.set_policy_in_force(policy)
        return policy

    def _name(self) -> str | None:
        settings = self.settings
        return None if settings is None else settings.policy.name

    @contextlib.contextmanager
    def block(self, **changes: Any) -> Iterator[None]:
        """Gives the block a setting of its own: the present one with `changes`."""
        token = _BLOCK.set(dataclasses.replace(self.present, **changes))
        try:
            with layers.global_policy_restored():
                self._tell_keras()
                yield
        finally:
            _BLOCK.reset(token)


IN_FORCE = InForce()


def prepare_thread() -> None:
    """Has Keras's policy be the one in force in a thread that has not heard of it.

    `keras.utils.clear_session()` resets it, and a new thread starts without it.
    """
    if IN_FORCE.settings is not None and layers.policy_in_force() is None:
        IN_FORCE.tell_thread()


@contextlib.contextmanager
def stock_policy(policy: str | keras.DTypePolicy) -> Iterator[None]:
    """Leaves layers that are made inside the block to Keras, under a policy of its own.

    The same policy set while tfamp is enabled would be tfamp's.
    """
    with IN_FORCE.block(settings=None, why=NOT_ENABLED):
        keras.config.set_dtype_policy(policy)
        yield


def is_in_force(policy: str) -> bool:
    """States whether new layers come under the policy of this name."""
    settings = IN_FORCE.settings
    if settings is None:
        return False
    return policy in (settings.policy.name, IN_FORCE.present.loaded)


_warned_policies: set[str] = set()


def warn_of_foreign_policy(policy: keras.DTypePolicy | None) -> None:
    """Warns once of a policy that other code set while tfamp was enabled."""
    name = "float32" if policy is None else policy.name
    if name in _warned_policies:
        return
    _warned_policies.add(name)
    warnings.warn(
        f"Keras's global policy was set to {name!r} by other code while tfamp was "
        "enabled, so new layers take it and tfamp's rules do not act on them. Leave "
        f"that line out, or name the policy in `tfamp.enable({name!r})`; for some "
        "layers alone use `tfamp.scope(...)`.",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


def forget_warnings() -> None:
    """Lets each warning be given once more, as after `enable`."""
    _warned_policies.clear()
