"""Writes an OCI archive of one image for one or more architectures; the same input gives the same bytes.

The files of an architecture are one layer. Nothing is read but the arguments and those files.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import tarfile
import time

MEDIA = "application/vnd.oci.image."


def entry(name, kind, mode, size=0, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.linkname = kind, mode, size, link
    return info


def layer(files, epoch):
    """A tar of the files below their folders, sorted, root's, with one time."""
    folders = set()
    for path in files:
        while path := os.path.dirname(path):
            folders.add(path)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(folders | set(files)):
            data = None
            if path in folders:
                info = entry(path, tarfile.DIRTYPE, 0o755)
            elif os.path.islink(files[path]):
                info = entry(path, tarfile.SYMTYPE, 0o777, link=os.readlink(files[path]))
            else:
                size = os.path.getsize(files[path])
                mode = 0o755 if os.access(files[path], os.X_OK) else 0o644
                info = entry(path, tarfile.REGTYPE, mode, size)
                data = open(files[path], "rb")
            info.mtime = epoch
            tar.addfile(info, data)
            if data:
                data.close()
    return raw.getvalue()


class Blobs:
    def __init__(self):
        self.all = {}

    def add(self, data, media, **more):
        digest = hashlib.sha256(data).hexdigest()
        self.all[digest] = data
        return {"mediaType": MEDIA + media, "digest": f"sha256:{digest}", "size": len(data), **more}

    def add_json(self, value, media, **more):
        return self.add(json.dumps(value, sort_keys=True).encode(), media, **more)


def manifest(blobs, args, arch, files, created):
    data = layer(files, args.epoch)
    labels = dict(label.split("=", 1) for label in args.label)
    config = {
        "architecture": arch,
        "os": "linux",
        "created": created,
        "config": {"User": args.user, "Entrypoint": args.entrypoint, "Env": args.env, "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
        "history": [{"created": created, "created_by": "images/oci.py"}],
    }
    packed = gzip.compress(data, compresslevel=args.level, mtime=0)
    layers = [blobs.add(packed, "layer.v1.tar+gzip")]
    value = {
        "schemaVersion": 2,
        "mediaType": MEDIA + "manifest.v1+json",
        "config": blobs.add_json(config, "config.v1+json"),
        "layers": layers,
        "annotations": labels,
    }
    print(f"{args.name[0]} {arch}: {len(data)} bytes, {len(packed)} packed")
    return blobs.add_json(value, "manifest.v1+json", platform={"architecture": arch, "os": "linux"})


def names(name):
    return {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }


class Architecture(argparse.Action):
    """--arch NAME: the --file that follow are its own."""

    def __call__(self, parser, args, value, option=None):
        if option == "--arch":
            args.archs.append((value, {}))
        elif not args.archs:
            parser.error("--file before --arch")
        else:
            path, source = value.split("=", 1)
            args.archs[-1][1][path.lstrip("/")] = source


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--name", action="append", required=True, help="repository and tag")
    parser.add_argument("--user", default="0:0")
    parser.add_argument("--entrypoint", action="append")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--epoch", type=int, default=0, help="the time of everything in it")
    parser.add_argument("--level", type=int, default=9, help="how well it is packed")
    parser.add_argument("--arch", action=Architecture)
    parser.add_argument("--file", action=Architecture, metavar="PATH=SOURCE")
    parser.set_defaults(archs=[])
    args = parser.parse_args()

    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(args.epoch))
    blobs = Blobs()
    manifests = [manifest(blobs, args, arch, files, created) for arch, files in args.archs]
    index = {"schemaVersion": 2, "mediaType": MEDIA + "index.v1+json"}
    both = blobs.add_json({**index, "manifests": manifests}, "index.v1+json")
    named = [{**both, "annotations": names(name)} for name in args.name]
    files = {f"blobs/sha256/{digest}": data for digest, data in blobs.all.items()}
    files["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    files["index.json"] = json.dumps({**index, "manifests": named}, sort_keys=True).encode()
    with tarfile.open(args.output + ".new", "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in sorted(files.items()):
            info = entry(name, tarfile.REGTYPE, 0o644, len(data))
            info.mtime = args.epoch
            tar.addfile(info, io.BytesIO(data))
    os.replace(args.output + ".new", args.output)


main()
