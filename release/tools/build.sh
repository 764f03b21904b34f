#!/bin/sh
# Builds a program that a release needs: build.sh NAME, one of the folders beside this file. Says what it
# does on stderr; the only line on stdout is the program's path.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/tests/go-tools.sh"
go_tools "$root/release/tools/$1" "release-tools/$1"
echo "$out/$1"
