"""What training takes: memory traded for time, learning rates for batch sizes."""

from tfamp.training.rate_search import LearningRates as LearningRates
from tfamp.training.rate_search import lr_find as lr_find
from tfamp.training.schedules import ScaledSchedule as ScaledSchedule
from tfamp.training.schedules import scale_learning_rate as scale_learning_rate
