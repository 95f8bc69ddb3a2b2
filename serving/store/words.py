"""What Mooncake's processes log, told as words of ours: without the library's own stamps, and not over and over."""

import re
import threading
import time
from collections.abc import Callable

REST_S = 60.0  # for which the same place in the library is not quoted again
SAID_BY_WORKERS = ("error=shm_not_mapped",)  # of a client that has lost workers' memory: they notice, and tell it
_LINE = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ (\S+:\d+)\] (.*)")  # glog's: level, day, time, thread, place, text


class NativeWords:
    """Is called with each line, from any thread."""

    def __init__(self, tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic):
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()  # of the one below
        self._told_s = dict[str, float]()  # by place

    def __call__(self, line: str) -> None:
        match = _LINE.fullmatch(line)
        if match is None:
            self._tell(f"Mooncake Store: {line}")
            return
        place, text = match.groups()
        if not any(known in text for known in SAID_BY_WORKERS) and self._is_due(place):
            self._tell(f"Mooncake Store: {text}")

    def _is_due(self, place: str) -> bool:
        now_s = self._clock()
        with self._lock:
            if now_s - self._told_s.get(place, float("-inf")) < REST_S:
                return False
            self._told_s[place] = now_s
            return True
