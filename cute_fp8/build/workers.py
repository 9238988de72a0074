"""A function over many items, in processes of their own that see no GPU.

``multiprocessing`` would import the caller's main module in each process, and run it where it has
no ``if __name__ == "__main__"``. These processes import this package and nothing else.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

#: Processes at most: each holds torch and the DSL.
MOST = 8
#: Not before the working folder, which ``-c`` puts first, is off the path: it may be anyone's.
_START = (
    "import sys; sys.path[:] = [folder for folder in sys.path if folder]; "
    "import pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from cute_fp8.build.workers import serve; serve()"
)


def run(function: Callable[[T], R], items: Sequence[T]) -> Generator[R, None, None]:
    """``map(function, items)``, in parallel; the results in order, each as soon as it is there.

    What a lost process had to do is done in this one. Warnings of the processes are dropped.

    Args:
        function: of a module of this package.
        items: things to pickle.
    """
    workers = _start(function, min(len(items), len(os.sched_getaffinity(0)), MOST))
    if not workers:
        yield from map(function, items)
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)
    closed = threading.Event()

    def call(item: T) -> R:
        worker = idle.get()
        try:
            result, error = worker.call(item)
        except (EOFError, OSError, pickle.UnpicklingError):
            if closed.is_set():
                raise
            return function(item)
        finally:
            idle.put(worker)
        if error is not None:
            raise error
        return result

    threads = ThreadPoolExecutor(len(workers))
    try:
        yield from threads.map(call, items)
    finally:
        closed.set()
        for worker in workers:
            worker.stop()
        threads.shutdown(cancel_futures=True)


def _start(function: Callable[..., Any], count: int) -> list[_Worker]:
    """That many processes; none where fewer than two make sense or can be had."""
    workers: list[_Worker] = []
    with suppress(OSError):
        while sys.executable and 1 < count > len(workers):
            workers.append(_Worker(function))
    return workers


class _Worker:
    """A process that calls one function, as often as it is told to."""

    def __init__(self, function: Callable[..., Any]):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        with suppress(BrokenPipeError):  # the first call will find out
            self._send(sys.path)
            self._send(function)

    def _send(self, message: object) -> None:
        assert self.process.stdin is not None
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def call(self, item: object) -> tuple[Any, Exception | None]:
        """The function's result, or what it raised.

        Raises:
            EOFError, OSError, UnpicklingError: the process is gone.
        """
        assert self.process.stdout is not None
        self._send(item)
        reply: tuple[Any, Exception | None] = pickle.load(self.process.stdout)
        return reply

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()


def serve() -> None:
    """What a process does: read the function, then an item and write the result until the end."""
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what is printed on the way goes to stderr
    sys.stdout = sys.stderr
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        function = pickle.load(sys.stdin.buffer)
        while True:
            item = pickle.load(sys.stdin.buffer)
            reply: tuple[Any, Exception | None]
            try:
                reply = function(item), None
            except Exception as error:
                reply = None, _portable(error)
            results.write(pickle.dumps(reply))


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same and can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error
