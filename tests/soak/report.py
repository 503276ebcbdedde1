#!/usr/bin/env python3
"""Reads reports of nextest (JUnit) for the task `soak` of `run`.

  slowest N REPORT          prints the filter expression of nextest for the N tests with the longest durations
  failures REPORT [TIMES]   prints how often each test failed; exits with 1 if any test failed, or if a test has another
                            number of results than TIMES (by default, as many as the test with the most)
"""

import collections
import sys
import xml.etree.ElementTree as ElementTree


def results(report):
    """Yields the binary, the name, the duration in seconds and whether it failed, for each result of a test."""
    for test in ElementTree.parse(report).iter("testcase"):
        failed = test.find("failure") is not None or test.find("error") is not None
        yield test.get("classname"), test.get("name"), float(test.get("time")), failed


def slowest(n, report):
    names = collections.defaultdict(list)
    tests = collections.defaultdict(float)
    for binary, name, seconds, _ in results(report):
        tests[binary, name] = max(tests[binary, name], seconds)
    for binary, name in sorted(tests, key=tests.get, reverse=True)[: int(n)]:
        names[binary].append(f"test(={name})")
    print(" | ".join(f"(binary_id(={binary}) & ({' | '.join(tests)}))" for binary, tests in names.items()))


def failures(report, times=None):
    runs = collections.defaultdict(list)
    for binary, name, seconds, failed in results(report):
        runs[binary, name].append((failed, seconds))
    n_failed = {test: sum(failed for failed, _ in runs[test]) for test in runs}
    times = int(times) if times else max(map(len, runs.values()), default=0)
    is_complete = bool(runs)
    print("failures  runs  seconds      test")
    for test in sorted(runs, key=lambda test: (-n_failed[test], test)):
        seconds = [seconds for _, seconds in runs[test]]
        is_complete &= len(seconds) == times
        print(f"{n_failed[test]:8}  {len(seconds):4}  {min(seconds):5.1f}-{max(seconds):<5.1f}  {' '.join(test)}")
    if not is_complete:
        print(f"incomplete: not every test has {times} results", file=sys.stderr)
    return 0 if is_complete and not any(n_failed.values()) else 1


if __name__ == "__main__":
    commands = {"slowest": slowest, "failures": failures}
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in commands or (sys.argv[1] == "slowest" and len(sys.argv) != 4):
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
