#!/bin/sh
# Checks the workflows of GitHub: that they are well formed, that every action is named by its commit, and
# that the targets that they make are there.
. "$(dirname "$0")/common.sh"
cd "$root"
# The owner of the action may move a tag.
! grep -nE 'uses: ' .github/workflows/*.yaml | grep -vE 'uses: (\./|[^@]+@[0-9a-f]{40} # v)' ||
    fail "name the actions above by commit, with the version behind it"
targets=$(make -pRrq : 2>/dev/null | awk '/^# Not a target/ { getline; next } match($0, /^[a-z-]+:/) { print substr($0, 1, RLENGTH - 1) }')
for target in $(grep -ohE '(run: |; |&& )make [a-z-]+' .github/workflows/*.yaml | sed 's/.*make //' | sort -u); do
    echo "$targets" | grep -qx "$target" || fail ".github/workflows: make $target: there is no such target"
done
# No shell is checked but ours: `run` has one command.
exec "$(tool actionlint)" -shellcheck= -pyflakes= -no-color
