#!/bin/sh
# Builds the Helm that the tests run: the major version in HELM, 4 without it. Says what it does on
# stderr; the only line on stdout is the program's path.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/go-tools.sh"
go_tools "$root/tests/helm/${HELM:-4}" "helm/${HELM:-4}"
echo "$out/helm"
