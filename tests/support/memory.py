"""The memory that work takes, measured in a process of its own."""

import os


def peak_of(work):
    """The peak of the memory of a child that does this, in bytes."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_maxrss * 1024
