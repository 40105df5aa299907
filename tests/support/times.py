"""Time for tests of waits, which need none."""


class Time:
    """A clock that only `sleep` moves."""

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
