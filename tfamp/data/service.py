"""Worker processes that read and map in place of this one."""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import tensorflow as tf

from tfamp import _checks
from tfamp.data import _service_reading
from tfamp.data._service_processes import (
    LocalWorker,
    RemoteWorker,
    ServiceError,
    Worker,
)

START_SECONDS = 120.0
STALL_SECONDS = 300.0
_JOIN_SECONDS = 2.0
# The client asks once a second, and slower the longer nobody answers.
_ANSWERED_SECONDS = 10.0


class Service:
    """Workers of the tf.data service, behind a pipeline by `build(service=...)`.

    Every worker runs the beginning of the pipeline and maps and filters its share of
    the elements; caching, sampling, shuffling and batching stay in this process. The
    elements are the same, none lost or doubled, and in the same order as without a
    service; where a filter drops some, in an order that depends on the number of
    workers. Good where decoding is the bottleneck and other machines, or cores that
    this process cannot use, are free. On one machine it is slower than threads, since
    elements are copied from process to process.

    A worker that dies ends the epoch with `ServiceError` within about a second (in
    `fit`: `tf.errors.UnknownError` with that text); nothing waits for ever. An epoch
    that is left early lets the next one begin with the first one's order again.

    TensorFlow opens the workers' ports on every interface of the machine, without a
    password. Where others can reach them, close them in the firewall.

    Args:
        num_workers: Processes to start on this machine; they end with this one.
        start_seconds: How long all of them together may take to start.
        stall_seconds: How long a worker that lives may give nothing.

    Raises:
        TypeError: `num_workers` is no integer.
        ValueError: An argument is not above 0.
        ServiceError: A worker does not start.

    Example:
        with tfamp.data.Service(2) as service:
            dataset = pipeline.map(decode).batch(32).build(service=service)
            model.fit(dataset, epochs=3)
    """

    def __init__(
        self,
        num_workers: int = 2,
        *,
        start_seconds: float = START_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        num_workers = _checks.positive_int("num_workers", num_workers)
        start_seconds = _checks.positive("start_seconds", start_seconds)
        self._set(stall_seconds, is_local=True)
        try:
            for _ in range(num_workers):
                self._local.append(LocalWorker())
            deadline = time.monotonic() + start_seconds
            for worker in self._local:
                worker.wait_until_ready(deadline)
        except BaseException:
            self.close()
            raise

    @classmethod
    def at(
        cls,
        addresses: Sequence[str],
        *,
        stall_seconds: float = STALL_SECONDS,
        _connect: Callable[[str], None] | None = None,
    ) -> "Service":
        """Uses workers that run already, on this machine or others.

        Start each with `python -m tfamp.data.service_worker --host=NAME --port=5000`,
        with the same versions of TensorFlow. Files must have the same paths there.

        Args:
            addresses: "host:port" of each worker.
            stall_seconds: How long a worker that answers may give nothing.

        Returns:
            A service; closing it leaves the workers running.

        Raises:
            TypeError: `addresses` is a string, or holds something else.
            ValueError: It is empty, one comes twice, or one is no "host:port".
            ServiceError: One does not answer within seconds.
        """
        _check_addresses(addresses)
        service = cls.__new__(cls)
        service._set(stall_seconds, is_local=False)
        for address in addresses:
            extra = {} if _connect is None else {"connect": _connect}
            service._remote.append(RemoteWorker(address, **extra))
        service.check()
        return service

    def _set(self, stall_seconds: float, *, is_local: bool) -> None:
        self.stall_seconds = _checks.positive("stall_seconds", stall_seconds)
        self.is_local = is_local
        self.readers: list[_service_reading.Reader] = []
        self._local: list[LocalWorker] = []
        self._remote: list[RemoteWorker] = []
        self._end = weakref.finalize(self, _stop_all, self._local, self.readers)

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, in the order in which they take elements."""
        return self._local if self.is_local else self._remote

    def check(self) -> None:
        """Raises if a worker is gone or the service was closed.

        Raises:
            ServiceError: Says which, and what to do.
        """
        if not self._end.alive:
            raise ServiceError(
                "This `Service` is closed; expected an open one. Build and use the "
                "dataset inside `with tfamp.data.Service(...)`."
            )
        for number, worker in enumerate(self.workers):
            problem = worker.problem()
            if problem is not None:
                remedy = "Start a new `tfamp.data.Service`"
                if not self.is_local:
                    remedy = "Start the worker again"
                raise ServiceError(
                    f"Worker {number} of {len(self.workers)} ({worker}) {problem}; "
                    "expected it to serve until the last epoch ends. "
                    f"{remedy}, build the pipeline again, and resume from the last "
                    "checkpoint."
                )

    def distribute(
        self,
        dataset: tf.data.Dataset,
        work: _service_reading.Work,
        *,
        num_threads: int | None = None,
    ) -> tf.data.Dataset:
        """Returns `work(dataset)`, done by the workers; what `build` calls.

        Args:
            dataset: What every worker runs to find its share: a source, with `take`
                and seeded shuffles as they are.
            work: Called once for each worker with its share; maps and filters.
            num_threads: For all workers on this machine together; None for one for
                each of its cores.

        Returns:
            A dataset with the same elements; its length is known where nothing
            between can drop elements.

        Raises:
            ValueError: An order or choice that differs from process to process,
                Python code, or a file cache.
            TypeError: Elements that cannot be sent.
            ServiceError: A worker is gone.

        Example:
            `service.distribute(files, lambda share: share.map(decode))`
        """
        self.check()
        return _service_reading.distribute(
            dataset, work, self, num_threads=num_threads or os.cpu_count() or 1
        )

    def close(self) -> None:
        """Ends the workers that were started here; twice does no harm."""
        self._end()

    def __enter__(self) -> "Service":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = ", ".join(worker.address for worker in self.workers)
        return f"Service({len(self.workers)} workers: {where})"


def _stop_all(
    workers: Sequence[LocalWorker], readers: Sequence[_service_reading.Reader]
) -> None:
    """Ends the reading first, since a read from a worker that is gone never ends."""
    for reader in readers:
        reader.stop()
    if not _join(readers, _JOIN_SECONDS):
        answers = [worker.answer() for worker in workers if worker.problem()]
        if any(answers):
            _join(readers, _ANSWERED_SECONDS)
        del answers  # the servers end with it
    for worker in workers:
        worker.stop()


def _join(readers: Sequence[_service_reading.Reader], seconds: float) -> bool:
    """Waits for threads, and returns whether all of them have ended."""
    deadline = time.monotonic() + seconds
    return all(reader.join(max(0.0, deadline - time.monotonic())) for reader in readers)


def _check_addresses(addresses: Sequence[str]) -> None:
    """Raises unless `addresses` holds different "host:port" texts."""
    if isinstance(addresses, str) or not all(isinstance(a, str) for a in addresses):
        raise TypeError(
            f"`addresses` is {addresses!r}; expected a list of 'host:port'. Pass "
            "['localhost:5000'] for one worker."
        )
    if not addresses or len(set(addresses)) != len(addresses):
        raise ValueError(
            f"`addresses` is {list(addresses)!r}; expected at least one, each once: a "
            "worker takes one share. Pass the address of every worker."
        )
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"`addresses` holds {address!r}; expected 'host:port', such as "
                "'localhost:5000'. Pass what the worker printed when it was ready."
            )
