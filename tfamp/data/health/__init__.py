"""Precision health of training data: what a compute dtype would spoil, and more."""

from tfamp.data.health.check import check as check
from tfamp.data.health.findings import apply_fixes as apply_fixes
