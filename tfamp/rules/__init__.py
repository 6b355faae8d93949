"""Which layers stay in float32, and why."""

from tfamp.rules.defaults import (
    DEFAULT_OPERATIONS as DEFAULT_OPERATIONS,
)
from tfamp.rules.defaults import (
    DEFAULT_RULES as DEFAULT_RULES,
)
from tfamp.rules.defaults import (
    EXACT_INPUT_LAYERS as EXACT_INPUT_LAYERS,
)
from tfamp.rules.defaults import (
    gains_nothing as gains_nothing,
)
from tfamp.rules.reading import KeepFloat32 as KeepFloat32
from tfamp.rules.reading import RuleSet as RuleSet
from tfamp.rules.reading import parse as parse
from tfamp.rules.rule import Rule as Rule
