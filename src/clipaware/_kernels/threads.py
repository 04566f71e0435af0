"""Threads for compiled code, which does not hold the interpreter's lock."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Result = TypeVar("Result")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_count = _cores()
_busy: list[Future[None]] = []  # what the pool was given to do, and may have done


def count() -> int:
    """How many threads a call may use."""
    return _count


def set_threads(number: int | None) -> None:
    """Set how many threads a call may use on the CPU.

    Results do not depend on it, but for the last digits of sums over very long rows. Calls that are too small to gain
    from threads do not use any, and calls from several Python threads at once share them. One is right where processes
    work side by side, as in a data loader's workers:
    ``DataLoader(..., worker_init_fn=lambda _: clipaware.set_threads(1))``.

    Parameters
    ----------
    number
        At least 1; or None for as many as this process has cores, as at the start.

    Examples
    --------
    >>> import clipaware as ca
    >>> ca.set_threads(1)
    >>> ca.set_threads(None)
    """
    global _busy, _count, _pool
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ValueError(f"number is {number!r}, expected a positive int or None")
    with _lock:
        _count, _pool = _cores() if number is None else number, None
        _busy = []  # that was the old pool's


def _forget() -> None:
    """In a forked child: its parent's threads did not come along, and its lock may be held for ever."""
    global _busy, _lock, _pool
    _busy, _lock, _pool = [], threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def run(work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
    """Call ``work(piece)`` for every piece, each taken by whoever is free: this thread, or one of the pool's.

    Where all of those are busy with other calls this thread does the whole work, so that calls from many threads do not
    wait for one another. After an error, Ctrl-C among them, pieces are finished but no more are begun.
    """
    if len(pieces) == 1:
        return work(pieces[0])
    left = deque(pieces)

    def drain() -> None:
        while True:
            try:
                piece = left.popleft()  # of which no two threads get the same
            except IndexError:
                return
            work(piece)

    helpers = _submitted(drain, len(pieces) - 1)
    try:
        drain()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    finally:
        left.clear()
    return None


def run_apart(work: Callable[[], Result]) -> Result:
    """What `work` returns, which may take long. Ctrl-C is heard while it does: then it is left to end by itself."""
    if threading.current_thread() is not threading.main_thread():
        return work()  # of which nobody else is interrupted
    from concurrent.futures import Future

    done: Future[Result] = Future()

    def working() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=working, name="clipaware", daemon=True).start()
    return done.result()


def _submitted(work: Callable[[], None], most: int) -> list[Future[None]]:
    """What threads that nobody uses have been given to do: nothing, if there are none."""
    global _pool
    with _lock:
        # Looked up, not counted: an interrupted call cannot forget to give its threads back.
        _busy[:] = [future for future in _busy if not future.done()]
        number = min(most, _count - 1 - len(_busy))
        if number < 1:
            return []
        if _pool is None:
            from concurrent.futures import ThreadPoolExecutor

            _pool = ThreadPoolExecutor(_count - 1, "clipaware")
        try:
            futures = [_pool.submit(work) for _ in range(number)]
        except RuntimeError:  # the interpreter is shutting down
            return []
        _busy.extend(futures)
        return futures
