#!/bin/sh
# Builds another scheduler of shared GPUs for bench-peers: volcano or kai. Says what it does on stderr; the two lines on stdout
# are the folder of its programs and that of its source, which has its resource definitions.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/go-tools.sh"
case $1 in
volcano) module=volcano.sh/volcano ;;
kai) module=github.com/NVIDIA/KAI-scheduler ;;
*)
    echo "peers: no $1: give volcano or kai" >&2
    exit 1
    ;;
esac
go_tools "$root/tests/peers/$1" "peers/$1"
echo "$out"
module_folder "$module"
