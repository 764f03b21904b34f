"""What the parts of `make test-gpu` share: programs that hold memory, and the lines that are printed."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# What a program takes of the GPU, MiB, and what its context may take beside it.
HELD, CONTEXT = 1024, 1024
# For what takes seconds.
SOON = 60

rows = []


def fail(text):
    sys.exit(f"test-gpu: {text}")


def says(kind, what, seen):
    rows.append((kind, what, seen))
    print(f"{kind:<8} {what}: {seen}", flush=True)


def check(what, is_so, seen):
    says("ok" if is_so else "FAILED", what, seen)


def run(*command):
    return subprocess.run([str(it) for it in command], capture_output=True, text=True, timeout=120)


def smi(what, fields):
    done = run("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    if done.returncode:
        fail(f"nvidia-smi: {done.stdout}{done.stderr}".strip())
    lines = (line for line in done.stdout.splitlines() if line.strip())
    return [dict(zip(fields, (cell.strip() for cell in line.split(",")))) for line in lines]


def agent_sees(agent):
    done = run(agent, "--once", "--output", "json")
    if done.returncode:
        fail(f"the agent: {done.stderr.strip()}")
    return json.loads(done.stdout)


def card_of(agent, uuid):
    return next(card for card in agent_sees(agent)["cards"] if card["uuid"] == uuid)


class Holder:
    """A program that holds memory of a GPU, in a cgroup if one is given. `said` is its line, or its error."""

    def __init__(self, program, uuid, mib, cgroup=None, env=None, user=None):
        def enter():
            if cgroup:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))

        self.process = subprocess.Popen(
            [program, "hold", str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid, **(env or {})},
            user=user,
        )
        self.pid = self.process.pid
        if not select.select([self.process.stdout], [], [], SOON)[0]:
            self.said = f"says nothing for {SOON} s"
            return
        self.said = self.process.stdout.readline().strip()
        if not self.said:
            self.said = self.process.stderr.read().strip()
            self.process.wait(timeout=SOON)

    @property
    def holds(self):
        return self.said.startswith("holds")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        if not self.holds:
            self.process.kill()
        self.process.wait(timeout=SOON)
