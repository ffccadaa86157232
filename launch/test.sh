#!/usr/bin/env bash
# Sets up .venv, then lint, types and tests. --all adds the long matrices; other arguments go to pytest.
# The tests of several hosts need root and a few Debian packages, which are installed where that is allowed.
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then arguments+=(--long); else arguments+=("$argument"); fi
done

for program in pdsh sshd ip iptables; do
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null; then
        install_debian pdsh openssh-server iproute2 iptables ||
            say "warning: $program is not installed and apt-get is not to be had: tests of several hosts are skipped"
        break
    fi
done

setup
failed=()
say "== ruff"
"$PY" -m ruff check . || failed+=("ruff check")
"$PY" -m ruff format --check . || failed+=("ruff format")
say "== mypy"
"$PY" -m mypy || failed+=("mypy")
say "== pytest ${arguments[*]:-}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
code=0
"$PY" -m pytest ${arguments[@]+"${arguments[@]}"} || code=$?
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed before the tests: %s\n' "${failed[@]}" >&2
    [ "$code" != 0 ] || code=1
fi
exit "$code"
