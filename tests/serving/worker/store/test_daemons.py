"""Threads for calls that may hang: their results, their end, and that of a process in which one hangs."""

import subprocess
import sys
import threading

import pytest

from moonshard.serving.worker.store.daemons import DaemonThreads


def test_calls_come_back_with_what_they_return_or_raise():
    threads = DaemonThreads(2, "test")
    assert threads.submit(divmod, 7, 2).result(30) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(30)
    assert threads.submit(divmod, 9, 2).result(30) == (4, 1)
    threads.close()


def test_every_thread_begins_with_what_it_is_told():
    begun = list[str]()
    threads = DaemonThreads(1, "test", initializer=lambda: begun.append(threading.current_thread().name))
    threads.submit(lambda: None).result(30)
    assert begun == ["test-0"]
    threads.close()


def test_once_closed_what_was_not_begun_never_is_and_threads_end_with_what_was():
    may_go, ran = threading.Event(), list[int]()
    threads = DaemonThreads(1, "test-end")
    running, waiting = threads.submit(may_go.wait), threads.submit(ran.append, 1)
    [thread] = (each for each in threading.enumerate() if each.name.startswith("test-end"))
    while not running.running():
        pass
    threads.close()
    threads.close()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        threads.submit(ran.append, 2)
    may_go.set()
    thread.join(30)
    assert not thread.is_alive()
    assert running.result(30)
    assert ran == []


def test_a_process_ends_though_a_call_hangs():
    code = (
        "import threading; from moonshard.serving.worker.store.daemons import DaemonThreads\n"
        "threads = DaemonThreads(2, 'test'); threads.submit(threading.Event().wait); threads.close()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
