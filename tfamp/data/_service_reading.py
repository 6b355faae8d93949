"""Shares a dataset out among workers and joins it again, exact and in order.

Worker i of n takes elements i, i + n, i + 2 n, ... and its own service hands out that
share alone, in order, so nothing depends on which worker is faster. It goes on from
epoch to epoch: the first elements of the next wait when the last one ends, and a
shuffle with a seed draws its next order as it would in this process.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp import _units
from tfamp.data._elements import bytes_of_element, known_length
from tfamp.data._service_graph import check_beginning, check_functions
from tfamp.data._service_processes import ServiceError

# Elements cross in chunks of about this size, which makes a call's cost small.
_CHUNK_BYTES = 2**22
_MAX_CHUNK = 256
_CHUNK_OF_UNKNOWN_SIZE = 32
# One chunk in use, one ready, beside what the service itself holds.
_CHUNKS_READY = 2
_POLL_SECONDS = 0.5

Work = Callable[[tf.data.Dataset], tf.data.Dataset]


class Reader:
    """Reads the endless chunks of one worker in a thread of its own.

    A read from a dead worker never returns, so nobody else may wait for it.
    """

    def __init__(self, chunks: tf.data.Dataset) -> None:
        self.found: queue.Queue[Any] = queue.Queue(_CHUNKS_READY)
        self._stopped = threading.Event()
        arguments = (chunks, self.found, self._stopped)
        # The thread must not hold the reader, or it would never be let go of.
        self._thread = threading.Thread(
            target=_read, args=arguments, name="tfamp service reader", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end with its present read."""
        self._stopped.set()

    def join(self, seconds: float) -> bool:
        """Waits for the thread, and returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def _read(
    chunks: tf.data.Dataset, found: queue.Queue[Any], stopped: threading.Event
) -> None:
    """Puts chunks, or the error that ends them, into `found` until told to stop."""
    try:
        for number, parts in chunks:
            item = int(number), tuple(part.numpy() for part in parts)
            if not _put(item, found, stopped):
                return
    except Exception as error:  # whatever a worker or the user's function raises
        _put(error, found, stopped)


def _put(item: Any, found: queue.Queue[Any], stopped: threading.Event) -> bool:
    """Puts an item and returns True, or False once told to stop."""
    while not stopped.is_set():
        try:
            found.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


class Streams:
    """The chunks of all workers, at the beginning of an epoch or inside one.

    Args:
        chunks: What each worker gives: pairs (number, parts), an empty chunk at the
            end of each epoch.
        service: What knows whether the workers live.
        clock: Seconds, for the limit on waiting.
    """

    def __init__(
        self,
        chunks: Sequence[tf.data.Dataset],
        service: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._clock = clock
        self._readers = [Reader(dataset) for dataset in chunks]
        self._numbers = [0] * len(self._readers)
        service.readers[:] = [r for r in service.readers if not r.join(0)]
        service.readers.extend(self._readers)
        self._end = weakref.finalize(self, _stop_all, self._readers)

    def stop(self) -> None:
        """Lets go of the workers."""
        self._end()

    def epoch(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields blocks of elements: one from each worker in turn, and so on.

        That is the order the elements had, where none was filtered out. Where some
        were, a worker whose share has ended is passed over.
        """
        live = list(range(len(self._readers)))
        while live:
            chunks = {worker: self._next(worker) for worker in live}
            live = [worker for worker in live if len(chunks[worker][0])]
            if live:
                yield _in_turn([chunks[worker] for worker in live])

    def _next(self, worker: int) -> tuple[np.ndarray, ...]:
        """Returns a worker's next chunk.

        Raises:
            ServiceError: The worker is gone, silent for too long, or not the same.
        """
        found = self._readers[worker].found
        deadline = self._clock() + self._service.stall_seconds
        item = _get(found)
        while item is None:
            self._service.check()
            if self._clock() > deadline:
                limit = _units.format_seconds(self._service.stall_seconds)
                raise ServiceError(
                    f"Worker {worker} ({self._service.workers[worker]}) gave nothing "
                    f"for {limit}, though it runs; expected a chunk of elements. Look "
                    "at what it waits for, such as a file system, or raise "
                    "`stall_seconds`."
                )
            item = _get(found)
        if isinstance(item, Exception):
            # A dead worker is the better reason.
            self._service.check()
            raise item
        number, parts = item
        expected, self._numbers[worker] = self._numbers[worker], number + 1
        if number != expected:
            raise ServiceError(
                f"Worker {worker} ({self._service.workers[worker]}) gave chunk "
                f"{number}; expected {expected}. It was started anew, or several "
                "workers share its dispatcher: elements would be lost or doubled. Give "
                "each worker a dispatcher of its own, and resume from the last "
                "checkpoint."
            )
        return parts


def _get(found: queue.Queue[Any]) -> Any:
    """Returns the next item, None if there is none for a while."""
    try:
        return found.get(timeout=_POLL_SECONDS)
    except queue.Empty:
        return None


def _stop_all(readers: Sequence[Reader]) -> None:
    for reader in readers:
        reader.stop()


def _in_turn(chunks: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Returns the rows of chunks, the first of each, then the second of each, ..."""
    if len(chunks) == 1:
        return chunks[0]
    lengths = [len(parts[0]) for parts in chunks]
    rows = np.concatenate([np.arange(length) for length in lengths])
    places = np.argsort(np.argsort(rows, kind="stable"), kind="stable")
    split = np.split(places, np.cumsum(lengths)[:-1])
    joined = []
    for parts in zip(*chunks, strict=True):
        first = parts[0]
        block = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for part, place in zip(parts, split, strict=True):
            block[place] = part
        joined.append(block)
    return tuple(joined)


class Epochs:
    """Gives the blocks of one epoch at each call; what `from_generator` iterates.

    An epoch that was read to its end hands its streams on to the next. One that was
    left early ends its own, and the next begins with the first epoch's order.
    """

    def __init__(self, chunks: Sequence[tf.data.Dataset], service: Any) -> None:
        self._chunks = chunks
        self._service = service
        self._idle: list[Streams] = []
        self._lock = threading.Lock()

    def __call__(self) -> Iterator[tuple[np.ndarray, ...]]:
        self._service.check()
        with self._lock:
            streams = self._idle.pop() if self._idle else None
        if streams is None:
            streams = Streams(self._chunks, self._service)
        is_whole = False
        try:
            yield from streams.epoch()
            is_whole = True
        finally:
            if is_whole:
                with self._lock:
                    self._idle.append(streams)
            else:
                streams.stop()


def distribute(
    dataset: tf.data.Dataset, work: Work, service: Any, *, num_threads: int
) -> tf.data.Dataset:
    """Returns `work(dataset)`, where workers of a service do the work.

    Args:
        dataset: What every worker runs whole, as far as it is needed to take its
            share: sources, `take`, shuffles with a seed.
        work: What each does to its share alone, called once for each worker: maps
            and filters.
        service: A `tfamp.data.Service`.
        num_threads: Threads for all workers on this machine together.

    Raises:
        ValueError: Something in it does not suit several processes.
        TypeError: Elements hold datasets, or others that cannot cross.
    """
    check_beginning(dataset)
    num_workers = len(service.workers)
    shares = [dataset.shard(num_workers, i) for i in range(num_workers)]
    worked = [work(share) for share in shares]
    check_functions(worked[0])
    spec = worked[0].element_spec
    transport = _Transport(spec)
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    if service.is_local:
        share_of_threads = max(1, -(-num_threads // num_workers))
        options.threading.private_threadpool_size = share_of_threads
    chunks = [
        tf.data.experimental.service.distribute(
            tf.data.experimental.service.ShardingPolicy.OFF,
            f"grpc://{worker.address}",
            # On one machine it would cost time and save nothing.
            compression=None if service.is_local else "AUTO",
        )(transport.chunks(part).with_options(options))
        for part, worker in zip(worked, service.workers, strict=True)
    ]
    blocks = tf.data.Dataset.from_generator(
        Epochs(chunks, service), output_signature=transport.block_spec
    )
    joined = transport.elements(blocks)
    lengths = [known_length(part) for part in worked]
    if None not in lengths:
        total = sum(length for length in lengths if length is not None)
        joined = joined.apply(tf.data.experimental.assert_cardinality(total))
    return joined


class _Transport:
    """How elements of a spec cross: in batches, as bytes where shapes vary.

    Args:
        spec: An element's spec.
    """

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self._parts = tf.nest.flatten(spec, expand_composites=True)
        if any(not isinstance(p, tf.TensorSpec) for p in self._parts) or any(
            p.dtype in (tf.variant, tf.resource) for p in self._parts
        ):
            raise TypeError(
                f"Elements hold {spec!r}; expected tensors, ragged or sparse ones "
                "included, that can be sent to another process. Turn datasets inside "
                "elements into tensors first, as with `.batch`."
            )
        self._is_dense = all(
            isinstance(part, tf.TensorSpec) and part.shape.is_fully_defined()
            for part in tf.nest.flatten(spec)
        )
        sent = self._parts
        if not self._is_dense:
            sent = [tf.TensorSpec((), tf.string) for _ in self._parts]
        self._batched = tuple(
            tf.TensorSpec([None, *part.shape], part.dtype) for part in sent
        )
        element_bytes = bytes_of_element(spec)
        self._size = _CHUNK_OF_UNKNOWN_SIZE
        if element_bytes is not None:
            self._size = min(_MAX_CHUNK, max(1, _CHUNK_BYTES // max(1, element_bytes)))

    @property
    def block_spec(self) -> tuple[tf.TensorSpec, ...]:
        """What a chunk or a block of several holds."""
        return self._batched

    def chunks(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns numbered chunks without an end, an empty one after each epoch."""

        def flat(*element: Any) -> tuple[tf.Tensor, ...]:
            parts = tf.nest.flatten(element, expand_composites=True)
            if self._is_dense:
                return tuple(parts)
            return tuple(tf.io.serialize_tensor(part) for part in parts)

        end = tf.data.Dataset.from_tensors(
            tuple(tf.zeros([0, *s.shape[1:]], s.dtype) for s in self._batched)
        )
        chunks = dataset.map(flat).batch(self._size).concatenate(end)
        return chunks.repeat().enumerate()

    def elements(self, blocks: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the elements of blocks, as they were before `chunks`."""

        def whole(*sent: tf.Tensor) -> Any:
            parts = list(sent)
            if not self._is_dense:
                for i, (text, spec) in enumerate(zip(sent, self._parts, strict=True)):
                    part = tf.io.parse_tensor(text, spec.dtype)
                    parts[i] = tf.ensure_shape(part, spec.shape)
            return tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)

        elements = blocks.unbatch()
        if self._is_dense and self._spec == tuple(self._parts):
            return elements
        return elements.map(whole)
