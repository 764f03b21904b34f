# Builds programs of Go for tests and releases; sourced by their build.sh. Up to date is decided by their go.mod
# and go.sum.

# go_tools PINS FOLDER [BIN]: those that PINS/go.mod names as tools, into FOLDER, or BIN in it, below the target
# folder of $root; $out is that FOLDER then. Programs of pure Go, unless the caller sets cgo=1; $tags are
# build tags.
go_tools() {
    pins=$1
    who=${2%%/*}
    target=${CARGO_TARGET_DIR:-$root/target}
    mkdir -p "$target/$2"
    target=$(cd "$target" && pwd)
    out=$target/$2
    bin=$out${3:+/$3}
    wanted=$(cat "$pins/go.mod" "$pins/go.sum" | sha256sum | cut -d' ' -f1)
    if ! go_built; then
        exec 9>"$out/lock"
        flock 9
        go_built || go_build
    fi
}

go_built() { [ "$(cat "$out/stamp" 2>/dev/null)" = "$wanted" ]; }

go_build() {
    go=go
    # The control plane's build fetches Go where there is none.
    command -v go >/dev/null || go=$target/control-plane/venv/bin/go
    command -v "$go" >/dev/null || {
        echo "$who: needs Go 1.26 or later: https://go.dev/dl, or tests/control-plane/build.sh" >&2
        exit 1
    }
    echo "$who: building what $pins/go.mod names" >&2
    rm -f "$out/stamp"
    (cd "$pins" && CGO_ENABLED=${cgo:-0} GOBIN=$bin GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off \
        "$go" install -trimpath -tags "${tags:-}" -ldflags='-s -w' tool >&2)
    echo "$wanted" >"$out/stamp"
}
