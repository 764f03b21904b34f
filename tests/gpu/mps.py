"""NVIDIA's MPS, with a control daemon of its own: who its clients are, and which limits hold.

Protocol: https://docs.nvidia.com/deploy/mps/index.html
"""

import errno
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from common import HELD, SOON, Holder, card_of, check, says

CONTROL = "nvidia-cuda-mps-control"
NOBODY = 65534


class Daemon:
    """A control daemon. It ends with its folder."""

    def __init__(self, folder, uuid):
        self.env = {
            "CUDA_MPS_PIPE_DIRECTORY": os.path.join(folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(folder, "log"),
        }
        for made in self.env.values():
            os.mkdir(made)
        # Clients of other users pass through.
        os.chmod(folder, 0o755)
        self.process = subprocess.Popen(
            [CONTROL, "-f"], env={**os.environ, **self.env, "CUDA_VISIBLE_DEVICES": uuid},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )

    def ask(self, command):
        """The daemon's answer; none if there is none within seconds."""
        try:
            done = subprocess.run([CONTROL], input=command + "\n", env={**os.environ, **self.env}, capture_output=True,
                                  text=True, timeout=SOON)
        except subprocess.TimeoutExpired:
            return None
        return (done.stdout + done.stderr).strip()

    def listens(self):
        """What a stream to the socket that the agent asks comes to: EPROTOTYPE is a live socket of another kind."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(SOON)
            try:
                stream.connect(os.path.join(self.env["CUDA_MPS_PIPE_DIRECTORY"], "control"))
            except OSError as error:
                return errno.errorcode.get(error.errno, str(error))
        return "connected"

    def clients(self):
        """Process ids by server, as text."""
        return {server: (self.ask(f"get_client_list {server}") or "").split() for server in (self.ask("get_server_list") or "").split()}

    def end(self):
        self.ask("quit -t 5")
        try:
            self.process.wait(timeout=SOON)
        except subprocess.TimeoutExpired:
            self.process.kill()


def until(what):
    for _ in range(100):
        if what():
            return True
        time.sleep(0.1)
    return False


def part(agent, program, uuid):
    if not shutil.which(CONTROL):
        says("not run", "MPS", f"there is no {CONTROL}")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        daemon = Daemon(folder, uuid)
        try:
            of_one_daemon(agent, program, uuid, daemon)
        finally:
            daemon.end()


def of_one_daemon(agent, program, uuid, daemon):
    ready = until(lambda: (daemon.ask("get_default_active_thread_percentage") or "").replace(".", "").isdigit())
    check("the socket of a daemon that answers", daemon.listens() in ("connected", "EPROTOTYPE"), daemon.listens())
    check("MPS answers", ready, daemon.ask("get_default_active_thread_percentage"))
    limit = {**daemon.env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={2 * HELD}M"}

    with Holder(program, uuid, HELD, env=limit) as holder:
        clients = daemon.clients()
        check("client of MPS within its limit", holder.holds, holder.said)
        check("MPS names the client", any(str(holder.pid) in it for it in clients.values()), clients)
        says("seen", "MPS: ps", daemon.ask("ps"))
        seen = {it["pid"]: it for it in card_of(agent, uuid)["processes"] or []}
        check("the agent knows the client", seen.get(holder.pid, {}).get("mps") is True, seen.get(holder.pid))
        servers = {pid: (it["used"] or 0) >> 20 for pid, it in seen.items() if str(pid) in clients}
        says("seen", "MiB of the MPS server", servers)

        with Holder(program, uuid, 3 * HELD, env=limit) as beyond:
            check("client of MPS beyond its limit", beyond.process.poll() == 2, beyond.said)
        with Holder(program, uuid, HELD * 5 // 4, env=limit) as one, Holder(program, uuid, HELD * 5 // 4, env=limit) as two:
            says("seen", "two processes of one pod under MPS", f"{one.said}; {two.said}")
            killed = one.process
            killed.kill()
            killed.wait()
            with Holder(program, uuid, HELD, env=limit) as after:
                check("clients outlive the death of another", after.holds and two.process.poll() is None, after.said)
        named = {**limit, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{uuid}={2 * HELD}M"}
        with Holder(program, uuid, 3 * HELD, env=named) as beyond:
            says("seen", "the limit by UUID", beyond.said)
        wrong = {**limit, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={2 * HELD}M,1={2 * HELD}M"}
        with Holder(program, uuid, 3 * HELD, env=wrong) as beyond:
            says("seen", "a limit that also names a GPU that is not there", beyond.said)
        astray = {**limit, "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
        with Holder(program, uuid, 3 * HELD, env=astray) as beyond:
            says("seen", "a wrong pipe directory", beyond.said)
            in_list = any(str(beyond.pid) in it for it in daemon.clients().values())
            check("MPS does not name who went past it", not in_list, daemon.clients())
        for percent in ["30", "1", "100"]:
            share = {**limit, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent}
            with Holder(program, uuid, HELD, env=share) as part:
                says("seen", f"{percent} % of compute", part.said)

    if os.geteuid() == 0:
        os.chmod(program, 0o755)
        os.chmod(os.path.dirname(program), 0o755)
        with Holder(program, uuid, HELD, env=limit, user=NOBODY) as other:
            says("seen", "a client of another user, the first user's clients gone", f"{other.said}; {daemon.clients()}")

    with Holder(program, uuid, HELD, env=limit) as holder:
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        says("seen", "the daemon is killed: its client", "goes on" if holder.process.poll() is None else holder.process.poll())
        with Holder(program, uuid, 3 * HELD, env=limit) as late:
            says("seen", "the daemon is killed: a new client beyond its limit", late.said)
    says("seen", "the daemon is killed: MPS answers", daemon.ask("get_server_list"))
    check("the socket of a daemon that was killed refuses", daemon.listens() == "ECONNREFUSED", daemon.listens())
