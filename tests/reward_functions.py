"""Reward functions that behave badly, for `test_collect_rewards`; they run in worker processes."""

import os
import sys
import time


def length(text):
    print("noise on stdout")
    return len(text)


def environment(name):
    return float(name in os.environ)


def behave(how):
    if how == "raise":
        raise ValueError("no answer found")
    if how == "sleep":
        time.sleep(60)
    if how == "exit":
        sys.exit(3)
    if how == "eat":
        return float(len(bytearray(1 << 32)))
    if how == "nan":
        return float("nan")
    if how == "text":
        return "good"
    return 1.0


def pid():
    return float(os.getpid())


def fails_once(marker):
    if not os.path.exists(marker):
        with open(marker, "w"):
            pass
        os._exit(1)
    return 0.5


def parent():
    return float(os.getppid())
