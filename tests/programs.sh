#!/bin/sh
# Compiles programs of ours as `cargo test` does: programs.sh NAME ... Alone they would be compiled with fewer features of
# their dependencies, and so with all of these again; the small test program beside them brings the features of tests in.
set -eu
cd "$(dirname "$0")/.."
for name; do
    shift
    set -- "$@" --bin "$name"
done
exec cargo build --locked --workspace --test advice "$@"
