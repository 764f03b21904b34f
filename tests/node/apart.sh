#!/bin/sh
# Runs a command with processes, mounts and a network of its own, which end with it: apart.sh COMMAND [ARGUMENT ...]
# There is no way out of that network. It has two addresses beside loopback's: the Service of the API
# server, where nothing forwards to it yet, and the node's.
set -eu
unshare --mount --net --pid --fork --mount-proc --kill-child --propagation private -- sh -euc '
    # Kubelets pass on to containers what is mounted later.
    mount --make-rshared /
    # Sockets, and where a driver in a container is found.
    mount -t tmpfs tmpfs /run
    # What the kernel'"'"'s half of a driver tells of MIG instances, where there is none.
    if [ ! -e /proc/driver/nvidia ]; then
        mount -t tmpfs tmpfs /proc/driver
        { cat /proc/devices; echo "236 nvidia-caps"; } >/run/devices
        mount --bind /run/devices /proc/devices
    fi
    ip link set lo up
    ip address add 10.0.0.1/32 dev lo
    ip address add 192.0.2.1/32 dev lo
    "$@"' apart "$@"
