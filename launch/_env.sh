# shellcheck shell=bash
# Shared by the scripts in this folder; sourced, not run. Sets ROOT (the checkout) and PY (the environment's Python).
#
#   setup             makes .venv and installs the package into it; does nothing when that is done already
#   run_job CMD...    runs a training command, passes signals on to its ranks, returns the job's true exit code

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
STAMP="$VENV/.clap_zero_installed"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
cd "$ROOT"

say() { printf '%s\n' "$*"; }

fail() {  # fail CODE MESSAGE: the codes are those of clap_zero/errors.py
    local code="$1"
    shift
    printf 'error: %s\n' "$*" >&2
    exit "$code"
}

find_python() {  # prints the first Python that is new enough: $PYTHON if given, else the usual names
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

install_debian() {  # for a bare Debian or Ubuntu as root; anybody else gets a message from the caller
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    apt-get update -qq </dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$@" </dev/null >/dev/null
}

make_venv() {  # make_venv PYTHON: Debian's Python comes without venv, or with venv and without pip
    local python="$1"
    "$python" -m venv "$VENV" >/dev/null 2>&1 && return 0
    if "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$VENV" >/dev/null 2>&1; then
        "$python" -m pip --python "$PY" install -q pip </dev/null && return 0
    fi
    install_debian python3-venv && "$python" -m venv "$VENV" && return 0
    fail 5 "$python cannot make a virtual environment: install its venv module (Debian: apt-get install python3-venv)"
}

usable_venv() {
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && "$PY" -m pip --version >/dev/null 2>&1
}

wanted() {  # what the environment has to match: where it is, what it runs, what it holds
    printf '%s\n' "$ROOT" "$("$1" -c 'import sys; print(*sys.version_info[:2])')"
    cat pyproject.toml hatch_build.py packaging/*.pth
}

has_moved() {  # the same folder under another name (a link, an automount) has not, and others may be running in it
    [ -f "$STAMP" ] && ! [ "$(head -n 1 "$STAMP")/.venv" -ef "$VENV" ]
}

pip_progress() {  # pip_progress [QUIET_S]: of what pip prints the large parts, and a word where it prints nothing for long
    local line name size unit large='(Downloading|Using cached) ([^ ]+) \(([0-9]+)[0-9.]* ([MG])B\)$'
    while :; do
        if IFS= read -r -t "${1:-30}" line; then
            if [[ "$line" =~ $large ]]; then
                name="${BASH_REMATCH[2]##*/}" size="${BASH_REMATCH[3]}" unit="${BASH_REMATCH[4]}B"
                [ "$unit" = MB ] && [ "$size" -lt 50 ] || say "  ${BASH_REMATCH[1]} ${name%%-*} ($size $unit)"
            elif [[ "$line" == "Installing collected packages:"* ]]; then
                say "  Unpacking"
            fi
        elif [ "$?" -gt 128 ]; then
            say "  still at it after $SECONDS s"
        else
            return 0
        fi
    done
}

setup_locked() {
    local python wanted_now free_kb
    python="$(find_python)" || { install_debian python3 python3-venv && python="$(find_python)"; } ||
        fail 5 "Python 3.11 or newer is needed; found $(python3 --version 2>&1 || true). Install it, or set PYTHON to its path"
    if [ -f "$STAMP" ] && usable_venv; then
        wanted_now="$(wanted "$PY")"
        has_moved || [ "$(tail -n +2 "$STAMP")" != "$(tail -n +2 <<<"$wanted_now")" ] || return 0
    fi
    # An environment is tied to its path: after a move its programs point to the old place. Only one that these scripts
    # made is removed.
    if has_moved; then rm -rf -- "$VENV"; fi
    usable_venv || make_venv "$python"
    rm -f -- "$STAMP"
    free_kb="$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')"
    [ "$free_kb" -gt 8000000 ] || say "warning: $((free_kb / 1000000)) GB free at $ROOT; the installation takes up to 7 GB"
    say "installing into $VENV: 6 GB and about two minutes, longer where the network is slow"
    SECONDS=0
    "$PY" -m pip install -q --upgrade pip </dev/null || say "warning: pip could not be upgraded; going on with the old one"
    PYTHONUNBUFFERED=1 "$PY" -m pip install --progress-bar off -e '.[dev]' </dev/null | pip_progress ||
        fail 5 "the installation failed; the reason stands above"
    say "installed in $SECONDS s"
    wanted "$PY" >"$STAMP"
}

setup() {  # one at a time: a second script waits for the first to finish installing
    if command -v flock >/dev/null; then
        exec 9<"$ROOT/launch"
        flock 9
        setup_locked 9>&-
        exec 9>&-
    else
        setup_locked
    fi
    export PATH="$VENV/bin:$PATH"
}

check_hostfile() {  # before anything is installed or started; the launcher checks once more, with what it will use
    local python
    python="$(find_python)" || fail 5 "Python 3.11 or newer is needed to read the hostfile; set PYTHON to its path"
    PYTHONPATH="$ROOT" "$python" -m clap_zero.launching.hostfile "$1" >/dev/null
}

num_devices() { "$PY" -c 'import torch; print(torch.cuda.device_count())'; }

signal_ranks() {  # signal_ranks PID: asks the ranks below the launcher PID to write a checkpoint and stop
    "$PY" - "$1" <<'PYTHON' || true
import sys
import psutil

LAUNCHERS = ("deepspeed.launcher.launch", "torchrun", "torch.distributed.run")
for process in psutil.Process(int(sys.argv[1])).children(recursive=True):
    try:
        parent = process.parent()
        if parent is not None and any(name in " ".join(parent.cmdline()) for name in LAUNCHERS):
            process.terminate()
    except psutil.NoSuchProcess:
        pass
PYTHON
}

# The launchers lose codes: see docs/launching.md. So each rank writes its own into a folder, and the folder decides.
# CODES is that folder; a job of several hosts sets it beforehand, to a place that all of them see.
run_job() {
    local codes pid code=0 signals=0
    codes="${CODES:-$(mktemp -d -t clap-zero-exit-codes.XXXXXX)}"
    # A session of its own: Ctrl-C reaches this script alone, which passes it on to the ranks and waits.
    CLAP_ZERO_EXIT_CODES="$codes" setsid "$@" </dev/null &
    pid=$!
    trap 'signals=$((signals + 1)); pass_signal "$pid" "$signals"' TERM INT HUP USR1
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do
        code=0
        wait "$pid" || code=$?
    done
    if [ "$signals" -gt 0 ]; then  # the last wait may have been cut short by a signal: the shell still knows the code
        local last=0
        wait "$pid" 2>/dev/null || last=$?
        [ "$last" = 127 ] || code="$last"
    fi
    trap - TERM INT HUP USR1
    code="$(true_code "$code" "$codes")"
    rm -rf -- "$codes"
    return "$code"
}

pass_signal() {  # pass_signal PID COUNT: the first asks for a checkpoint, the second ends the job
    if [ "$2" -gt 1 ]; then
        say "second signal: ending the job at once"
        kill -KILL -- "-$1" 2>/dev/null || true
    elif [ "${JOB_KIND:-local}" = local ]; then
        say "stopping: the ranks write a checkpoint (once more to end at once)"
        signal_ranks "$1"
    else
        say "stopping: the launcher ends its nodes; the ranks have 30 s for a checkpoint"
        kill -TERM "$1" 2>/dev/null || true
    fi
}

true_code() {  # true_code LAUNCHER_CODE FOLDER: prints the code of the job
    local launcher="$1" folder="$2" file value worst=0 waited=0
    while grep -qsx running "$folder"/* && [ "$waited" -lt 5 ]; do  # ranks notice a dead launcher within a second
        sleep 1
        waited=$((waited + 1))
    done
    for file in "$folder"/*; do
        [ -f "$file" ] || continue
        value="$(cat "$file")"
        case "$value" in
            running) value=5 ;;  # killed
            *[!0-9]* | '') continue ;;
        esac
        # 5 is often the echo of another rank's failure, and 1 says less than any other.
        case "$worst:$value" in
            *:0) ;;
            0:* | 5:[!5]* | 1:[!15]*) worst="$value" ;;
        esac
    done
    if [ "$worst" != 0 ]; then echo "$worst"; else echo "$launcher"; fi
}
