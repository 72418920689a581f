"""Work on all processors of this process, block by block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from threading import Lock, Thread
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.blas import one_thread_each

Block = TypeVar("Block")
_PLACES = 500_000  # below twice as many a thread costs more than it saves


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(work: Callable[[Block], None], blocks: Iterable[Block]) -> None:
    """Do the work for every block, on all processors: numpy lets go of the interpreter's lock."""
    left, lock = iter(blocks), Lock()
    errors: list[BaseException] = []

    def one_after_the_other() -> None:
        while not errors:
            try:
                with lock:
                    block = next(left)
            except StopIteration:
                return
            try:
                work(block)
            except BaseException as error:
                errors.append(error)

    threads = [Thread(target=one_after_the_other) for _ in range(processors() - 1)]
    with one_thread_each():
        for thread in threads:
            thread.start()
        one_after_the_other()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def taken(values: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
    """`values[places]`, for very many places: where they lie far apart it is memory that takes the time."""
    if len(places) < 2 * _PLACES:
        return values.take(places)
    found = np.empty(len(places), values.dtype)

    def take(start: int) -> None:
        part = slice(start, start + _PLACES)
        np.take(values, places[part], out=found[part], mode="clip")  # with "raise" numpy copies `out`

    side_by_side(take, range(0, len(places), _PLACES))
    return found
