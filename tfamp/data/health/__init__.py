"""Precision health of training data: what a compute dtype would spoil, and more."""

from tfamp.data.health.check import apply_fixes as apply_fixes
from tfamp.data.health.check import check as check
