"""Fetches the programs of a Kubernetes release and of etcd, held to the sums in a minor's folder.

    fetch.py get SUMS FOLDER PROGRAM...   installs these programs in FOLDER
    fetch.py sums KUBERNETES ETCD         prints the sums of both releases, as sha256sum does

GPUSTOW_DOWNLOADS is an address that has both instead of dl.k8s.io and GitHub.
"""

import hashlib
import http.client
import io
import os
import platform
import shutil
import sys
import tarfile
import time
import urllib.request

SILENCE = 15  # Seconds without a byte.
LIMIT = 300  # Seconds for all.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PROGRAMS = ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet"]
ETCD = "https://github.com/etcd-io/etcd/releases/download"


def url(path):
    default = ETCD if "/etcd-" in path or path.endswith("SHA256SUMS") else "https://dl.k8s.io"
    return f"{os.environ.get('GPUSTOW_DOWNLOADS') or default}/{path}"


def content(path, until):
    """The bytes at a path, complete."""
    with urllib.request.urlopen(url(path), timeout=SILENCE) as answer:
        size = int(answer.headers["Content-Length"])
        whole = bytearray()
        while piece := answer.read(1 << 20):
            whole += piece
            if time.monotonic() > until:
                raise OSError(f"{len(whole)} of {size} bytes in {LIMIT} s")
    if len(whole) != size:
        raise OSError(f"{len(whole)} of {size} bytes came")
    return bytes(whole)


def get(sums, folder, *programs):
    architecture = ARCHITECTURES.get(platform.machine())
    with open(sums, encoding="ascii") as file:
        wanted = dict(reversed(line.split()) for line in file)
    until = time.monotonic() + LIMIT
    for program in programs:
        ends = f"-linux-{architecture}.tar.gz" if program == "server" else f"/linux/{architecture}/{program}"
        path = next((path for path in wanted if path.endswith(ends)), None)
        if path is None:
            sys.exit(f"fetch: {sums} has no {program} for {platform.machine()}")
        try:
            whole = content(path, until)
        except (OSError, TypeError, http.client.HTTPException) as error:
            sys.exit(f"fetch: no {program} from {url(path)}: {error}")
        if hashlib.sha256(whole).hexdigest() != wanted[path]:
            sys.exit(f"fetch: {url(path)} is not what {sums} says: its SHA-256 differs")
        if program == "server":
            name = path.rsplit("/", 1)[1].removesuffix(".tar.gz")
            with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
                whole = archive.extractfile(f"{name}/etcd").read()
        target = os.path.join(folder, program)
        with open(target + ".new", "wb") as file:
            file.write(whole)
        os.chmod(target + ".new", 0o755)
        shutil.move(target + ".new", target)


def sums(kubernetes, etcd):
    until = time.monotonic() + LIMIT
    for architecture in ARCHITECTURES.values():
        for program in PROGRAMS:
            path = f"{kubernetes}/bin/linux/{architecture}/{program}"
            print(content(path + ".sha256", until).decode().split()[0], f" {path}")
        name = f"etcd-{etcd}-linux-{architecture}.tar.gz"
        listed = content(f"{etcd}/SHA256SUMS", until).decode().splitlines()
        print(next(line.split()[0] for line in listed if line.endswith(name)), f" {etcd}/{name}")


if __name__ == "__main__":
    {"get": get, "sums": sums}[sys.argv[1]](*sys.argv[2:])
