# Reads lines "name value" in the order of name and value; prints each name's median, least and most.
function line() {
    if (n) printf "%s: %.1f (%.1f to %.1f), %d runs\n",
        name, (at[int((n + 1) / 2)] + at[int(n / 2) + 1]) / 2, at[1], at[n], n
    n = 0
}
$1 != name { line(); name = $1 }
{ at[++n] = $2 }
END { line() }
