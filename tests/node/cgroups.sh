#!/bin/sh
# Runs a command that sees cgroups of the version that a file names, 1 or 2, whichever this machine has:
# cgroups.sh FILE COMMAND [ARGUMENT ...]
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
case $(cat "$1")$(stat -fc %T /sys/fs/cgroup) in
2*) mount='mount -t cgroup2 cgroup2 /sys/fs/cgroup' ;;
1cgroup2fs) mount='mount -t tmpfs tmpfs /sys/fs/cgroup' ;;
*) mount=: ;;
esac
shift
exec unshare --mount --propagation private -- sh -euc "$mount"'; exec "$@"' cgroups "$@"
