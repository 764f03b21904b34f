#!/bin/sh
# Builds a neighbour that the tests run: kueue, jobset, or karpenter with its simulated cloud. Says what it does on stderr; the
# two lines on stdout are the program's path and the folder of its source, which has its manifests.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/go-tools.sh"
go_tools "$root/tests/neighbours/$1" "neighbours/$1"
case $1 in
karpenter) echo "$out/kwok" ;;
*) echo "$out/$1" ;;
esac
module_folder "sigs.k8s.io/$1"
