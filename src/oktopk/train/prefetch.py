"""Prepare batches in a thread while earlier ones are trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_END = object()


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Yield the same items in the same order; a thread prepares up to `depth` of them in advance.

    >>> list(prefetch(iter("abc")))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, "oktopk data") as pool:
        waiting: deque[Future[object]] = deque(pool.submit(next, items, _END) for _ in range(depth))
        try:
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(pool.submit(next, items, _END))
                yield item  # type: ignore[misc]
        finally:
            for future in waiting:
                future.cancel()
