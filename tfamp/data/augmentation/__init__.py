"""Random changes of images, on the input's workers or in the model."""

from tfamp.data.augmentation.layer import Augment as Augment
from tfamp.data.augmentation.transforms import DEFAULT as DEFAULT
from tfamp.data.augmentation.transforms import Brightness as Brightness
from tfamp.data.augmentation.transforms import Contrast as Contrast
from tfamp.data.augmentation.transforms import Cutout as Cutout
from tfamp.data.augmentation.transforms import Flip as Flip
from tfamp.data.augmentation.transforms import Rotate as Rotate
from tfamp.data.augmentation.transforms import Shift as Shift
from tfamp.data.augmentation.transforms import Transform as Transform
