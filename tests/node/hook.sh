#!/bin/sh
# NVIDIA's hooks of containers as the test wants them: hook.sh FOLDER HOOK ARGUMENT ... FOLDER/toolkit is the
# toolkit's version, before 1.20.1 without limits of memory; FOLDER/cgroups that of cgroups, which the hook sees.
set -eu
folder=$1 hook=$2
shift 2
case $1,$(cat "$folder/toolkit") in
apply-cuda-memory-limits,1.20.1) exec "$(dirname "$0")/cgroups.sh" "$folder/cgroups" "$hook" "$@" ;;
apply-cuda-memory-limits,*) ;;
*) exec "$hook" "$@" ;;
esac
