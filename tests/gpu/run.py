"""Runs the agent on a machine's real GPU: what it sees beside nvidia-smi, whose memory is whose, and, where the
driver has them, limits, suspended processes and MPS. Needs a GPU with its driver, nvidia-smi and a C compiler; the parts
about pods and limits need root and a cgroup file system that can be written. Prints a line for each check, then the table
for docs/platforms.md; ends with 1 where a check fails.

    run.py [AGENT]      the agent's program, else target/debug/gpustow-agent
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mps
from common import CONTEXT, HELD, HERE, Holder, agent_sees, card_of, check, fail, rows, run, says, smi

CGROUPS = Path("/sys/fs/cgroup")
POD = "9a3c7f52-0d0e-4b5e-9a61-1f0a5d3c2b10"
CONTAINER = "ab" * 32


def cards(agent, smi_cards):
    seen = agent_sees(agent)
    ours = {card["uuid"]: card for card in seen["cards"]}
    check("driver", seen["driver"] == smi_cards[0]["driver_version"], seen["driver"])
    for card in smi_cards:
        uuid, total = card["uuid"], int(card["memory.total"])
        if card.get("mig.mode.current") == "Enabled":
            says("not run", card["name"], "it is divided by MIG: nvidia-smi's numbers are of the whole")
            continue
        memory = (ours.get(uuid) or {}).get("memory")
        mib = memory and memory["total"] >> 20
        check(f"{card['name']} {uuid}", mib is not None and abs(mib - total) <= 1, f"agent {mib} MiB, nvidia-smi {total} MiB")


def used(agent, program, uuid):
    """Memory in use, by process."""
    with Holder(program, uuid, HELD) as holder:
        if not holder.holds:
            fail(f"no memory of the GPU: {holder.said}")
        # nvidia-smi and the agent are asked one after the other: others may come and go between.
        for _ in range(5):
            apps = smi("compute-apps", ["pid", "gpu_uuid", "used_gpu_memory"])
            theirs = {int(app["pid"]): app["used_gpu_memory"] for app in apps if app["gpu_uuid"] == uuid}
            card = card_of(agent, uuid)
            ours = {it["pid"]: "[N/A]" if it["used"] is None else str(it["used"] >> 20) for it in card["processes"] or []}
            if ours == theirs:
                break
            time.sleep(1)
        check("memory by process", ours == theirs, f"agent {ours}, nvidia-smi {theirs}")
        mib = ours.get(holder.pid, "")
        foreign = [pid for pid in ours if not Path("/proc", str(pid)).exists()]
        if not mib and foreign:
            says("not run", "the program's own", f"NVML names processes that are not to be seen from here: {foreign}")
            return
        is_so = mib.isdigit() and HELD <= int(mib) <= HELD + CONTEXT
        check("the program's own", is_so, f"{mib or 'no'} MiB, of which it allocated {HELD}")


def make_cgroup(*names, version=None):
    unified = (CGROUPS / "cgroup.controllers").exists()
    if version == 2 and not unified:
        raise OSError(f"{CGROUPS} is not of cgroup v2")
    made = CGROUPS.joinpath("" if unified else "memory", *names)
    made.mkdir(parents=True, exist_ok=True)
    return made


def of_pods(agent, program, uuid):
    """Whose memory it is, by the cgroup."""
    try:
        cgroup = make_cgroup("kubepods", f"pod{POD}", CONTAINER)
    except OSError as error:
        says("not run", "memory of a pod", f"no cgroup of a pod can be made here: {error}")
        return
    try:
        with Holder(program, uuid, HELD, cgroup) as holder:
            card = card_of(agent, uuid)
            mine = [it["of"] for it in card["processes"] or [] if it["pid"] == holder.pid]
            check("memory of a pod", mine == [{"pod": POD, "container": CONTAINER}], mine)
    finally:
        for made in [cgroup, cgroup.parent]:
            made.rmdir()


def limits(agent, program, uuid):
    """A limit of memory by cgroup holds."""
    able = card_of(agent, uuid)["can_limit"]
    try:
        cgroup = make_cgroup("gpustow-test-gpu", version=2)
    except OSError as error:
        says("not run", "limits", f"no cgroup can be made here: {error}")
        return
    try:
        done = run(program, "limit", cgroup, uuid, 2 * HELD)
        if done.returncode:
            check("the agent says of limits what the driver says", not able, done.stderr.strip())
            says("not run", "limits", done.stderr.strip())
            return
        check("the agent says of limits what the driver says", able, done.stdout.strip())
        with Holder(program, uuid, HELD, cgroup) as holder:
            check("within the limit", holder.holds, holder.said)
        with Holder(program, uuid, 3 * HELD, cgroup) as holder:
            check("beyond the limit", holder.process.poll() == 2, holder.said)
        with Holder(program, uuid, 3 * HELD) as holder:
            check("the same without the limit", holder.holds, holder.said)
    finally:
        cgroup.rmdir()


def suspends(program, uuid):
    """How long a process needs to give its memory up and to get it back, without a word from its program."""
    for mib in [HELD, 16 * HELD]:
        with Holder(program, uuid, mib) as holder:
            with subprocess.Popen([program, "suspend", str(holder.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) as suspend:
                gone = suspend.stdout.readline().strip()
                if not gone:
                    says("not run", "suspended", suspend.stderr.read().strip())
                    return
                apps = smi("compute-apps", ["pid", "used_gpu_memory"])
                left = [app["used_gpu_memory"] for app in apps if app["pid"] == str(holder.pid)]
                back, error = suspend.communicate()
            check(f"{mib} MiB suspended", not suspend.returncode, f"gone in {gone}, {left} MiB left, back in {back.strip()}{error}")


def main():
    if not shutil.which("nvidia-smi"):
        fail("there is no nvidia-smi: this needs a machine with an NVIDIA GPU and its driver")
    fields = ["index", "uuid", "name", "memory.total", "driver_version", "mig.mode.current"]
    smi_cards = smi("gpu", fields)
    if not smi_cards:
        fail("nvidia-smi knows of no GPU")
    agent = sys.argv[1] if len(sys.argv) > 1 else HERE.parent.parent / "target/debug/gpustow-agent"
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "gpu")
        built = run(os.environ.get("CC", "cc"), "-O1", "-Wall", "-Wextra", "-o", program, HERE / "gpu.c", "-ldl")
        if built.returncode:
            fail(f"gpu.c does not compile: {built.stderr}")
        cards(agent, smi_cards)
        whole = [card["uuid"] for card in smi_cards if card["mig.mode.current"] != "Enabled"]
        if whole:
            used(agent, program, whole[0])
            of_pods(agent, program, whole[0])
            limits(agent, program, whole[0])
            suspends(program, whole[0])
            mps.part(agent, program, whole[0])
    print(f"\n| seen on {smi_cards[0]['name']}, driver {smi_cards[0]['driver_version']} | | |\n|---|---|---|")
    for kind, what, seen in rows:
        print(f"| {what} | {kind} | {seen} |")
    sys.exit(any(kind == "FAILED" for kind, *_ in rows))


if __name__ == "__main__":
    main()
