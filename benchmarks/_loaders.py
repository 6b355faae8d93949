"""The loaders of PyTorch and Grain, with the decoder that tfamp calls "opencv"."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np


def read(path: str, size: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Returns a uint8 RGB image and its class, the name of its folder."""
    import cv2
    import simplejpeg

    with open(path, "rb") as file:
        image = simplejpeg.decode_jpeg(file.read(), "RGB", fastdct=True)
    return cv2.resize(image, size[::-1]), int(path.split(os.sep)[-2])


class Images:
    """Image files by number, as PyTorch wants its data."""

    def __init__(self, paths: list[str], size: tuple[int, int]) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Returns an image and its class."""
        return read(self.paths[index], self.size)


def torch_loader(
    paths: list[str], size: tuple[int, int], batch_size: int, cores: int
) -> Iterable[Any]:
    """Returns PyTorch's loader with one lasting worker process for each core."""
    import torch.utils.data

    return torch.utils.data.DataLoader(
        Images(paths, size),  # type: ignore[arg-type]
        batch_size=batch_size,
        num_workers=cores,
        persistent_workers=True,
        # Forking a process whose TensorFlow runs threads may stop for ever.
        multiprocessing_context="spawn",
    )


def grain_loader(
    paths: list[str], size: tuple[int, int], batch_size: int, cores: int
) -> Iterable[Any]:
    """Returns Grain's dataset with one reading thread for each core."""
    import grain.python as grain

    options = grain.ReadOptions(num_threads=cores, prefetch_buffer_size=2 * batch_size)
    images = grain.MapDataset.source(paths).map(lambda path: read(path, size))
    return images.to_iter_dataset(options).batch(batch_size)
