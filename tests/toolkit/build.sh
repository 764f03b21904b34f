#!/bin/sh
# Builds the parts of NVIDIA's container toolkit that the tests run: the runtime and its hooks. Says what it
# does on stderr; the only line on stdout is the folder of the binaries.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/go-tools.sh"
# It loads the driver's library by C's dlopen; what that has is looked up when it is called.
cgo=1
export CGO_LDFLAGS=-Wl,--unresolved-symbols=ignore-in-object-files CGO_LDFLAGS_ALLOW='-Wl,.*'
go_tools "$root/tests/toolkit" toolkit
echo "$out"
