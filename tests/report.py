#!/usr/bin/env python3
"""Runs a command that runs tests, and ends with one line: how many passed, in what time, and what to run next.

    report.py NAME NEXT COMMAND [ARGUMENT ...]
"""

import re
import subprocess
import sys
import time


def main(name, following, *command):
    began = time.monotonic()
    passed = failed = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"(\d+) passed; (\d+) failed;", line):
                passed += int(found[1])
                failed += int(found[2])
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    verdict = f"{passed} tests passed" if run.returncode == 0 else f"FAILED: {passed} tests passed, {failed} failed"
    print(f"{name}: {verdict} in {minutes} min {seconds} s. {following}")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
