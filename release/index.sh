#!/bin/sh
# Writes the sums of all that a release attaches, and krew's entry with those of the plugin. With PARTIAL=1
# the entry lacks the systems that this machine has no plugin of.
. "$(dirname "$0")/common.sh"
cd "$dist"
rm -f checksums.txt checksums.txt.* krew-gpustow.yaml

awk -v tag="$tag" -v partial="${PARTIAL:-}" '
    function sum(file,    command, fields) {
        command = "sha256sum \"" file "\" 2>/dev/null"
        fields = ""
        command | getline fields
        close(command)
        return substr(fields, 1, 64)
    }
    { gsub(/\{\{ \.TagName \}\}/, tag) }
    /^#/ { next }
    # A platform is three lines; its first waits until the second says where the archive is.
    /- selector:/ { selector = $0; keep = 0; next }
    /addURIAndSha/ {
        split($0, quoted, "\"")
        file = quoted[2]
        sub(/.*\//, "", file)
        digest = sum(file)
        if (digest == "") {
            if (partial) { left_out = 1; next }
            print "release: no " file > "/dev/stderr"
            exit 1
        }
        print selector
        print "      uri: " quoted[2]
        print "      sha256: " digest
        next
    }
    left_out && /^      bin:/ { left_out = 0; next }
    { print }
' "$root/.krew.yaml" >krew-gpustow.yaml
sha256sum -- * >"$target/checksums.txt"
mv "$target/checksums.txt" .
cat checksums.txt
