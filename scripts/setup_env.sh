# shellcheck shell=bash
# Sourced by demo.sh and test.sh: makes or reuses .venv in the project root, then leaves the shell in the project root with
# that environment first on PATH. Needs a Python 3.10+ ($PYTHON, else python3) and, when something is to be installed, the
# package index that pip is configured for. The caller has `set -euo pipefail`. All it says goes to stderr: stdout belongs to what runs afterwards.

rp_say() { printf 'setup: %s\n' "$*" >&2; }
rp_die() { rp_say "error: $*"; exit 1; }

rp_torch_fits() { # PYTHON; does its torch lie in setup.cfg's range? (metadata only, quick)
    "$1" - "$RP_ROOT/setup.cfg" 2>/dev/null <<'PY'
import re, sys
from importlib.metadata import version
number = lambda text: tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:2])
low, high = re.search(r"^\s*torch>=([\d.]+),<([\d.]+)\s*$", open(sys.argv[1]).read(), re.M).groups()
sys.exit(not number(low) <= number(version("torch")) < number(high))
PY
}

# pip's output goes to a log, whose tail is shown if it fails. Big downloads and silence are reported in between. The reader
# is part of the pipeline, not a background job, so that Ctrl-C ends all of it.
rp_pip() { # arguments of pip install
    local log status=0
    log=$(mktemp)
    "$RP_VENV/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" 2>&1 |
        rp_progress "$log" || status=$?
    if ((status)); then
        rp_say "error: pip install $* failed; the end of its output:"
        tail -n 25 "$log" | cut -c 1-400 | sed 's/^/    /' >&2
    fi
    rm -f "$log"
    return "$status"
}

rp_progress() { # LOG; reads pip's output
    local line status begin=$SECONDS
    while :; do
        status=0
        IFS= read -r -t 15 line || status=$?
        if ((status > 128)); then # nothing for 15 s; what there is of a line is kept
            printf '%s' "$line" >>"$1"
            rp_say "  ... still at it, $((SECONDS - begin)) s"
            continue
        fi
        if [[ $line =~ ^[[:space:]]*Downloading\ .*[0-9]{2}\.[0-9]\ MB\) ]]; then
            rp_say "  ${line#"${line%%[![:space:]]*}"}"
        fi
        printf '%s\n' "$line" >>"$1"
        ((status == 0)) || break
    done
}

rp_find_python() { # sets RP_PYTHON
    local given=${PYTHON:-python3} found
    RP_PYTHON=$(command -v -- "$given") ||
        rp_die "no Python found as '$given'; install Python 3.10 or newer or set PYTHON to its path."
    found=$("$RP_PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
        rp_die "'$given' ($RP_PYTHON) does not run as a Python; set PYTHON to the path of a Python 3.10 or newer."
    "$RP_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        rp_die "rpruntime needs Python 3.10 or newer, but '$given' is $found; set PYTHON to the path of a newer one."
    # .venv itself may be the active environment; it cannot be remade from the inside.
    if [[ $("$RP_PYTHON" -c 'import os, sys; print(os.path.realpath(sys.prefix))') == "$(realpath -m "$RP_VENV")" ]]; then
        RP_PYTHON=$("$RP_PYTHON" -c 'import sys; print(sys._base_executable)')
    fi
}

rp_make_venv() {
    local flags=() share=no
    rp_find_python
    "$RP_PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        rp_die "$RP_PYTHON has no 'venv' with 'ensurepip', which makes .venv; install it (Debian, Ubuntu:" \
            "apt install $("$RP_PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))" \
            "or set PYTHON to a Python that has it."
    if [[ -e $RP_VENV || -L $RP_VENV ]]; then
        rp_say "removing the unfinished or broken .venv"
        rm -rf -- "$RP_VENV"
    fi
    if rp_torch_fits "$RP_PYTHON" && "$RP_PYTHON" -c 'import torch' >/dev/null 2>&1; then
        share=yes
        rp_say "$RP_PYTHON already has a fitting torch: it is shared, not installed again"
    fi
    # --system-site-packages always means the base interpreter's packages. If the Python found is a virtual environment
    # itself, torch lies in that environment, so a .pth file names its folders instead; they come after .venv's own.
    # (Installing into that environment would be shorter, but it is the user's.)
    if [[ $share == yes ]] && "$RP_PYTHON" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
        flags=(--system-site-packages)
    fi
    rp_say "making .venv with $RP_PYTHON"
    mkdir "$RP_VENV"
    : >"$RP_VENV/$RP_UNFINISHED"
    "$RP_PYTHON" -m venv "${flags[@]}" "$RP_VENV" >&2 || rp_die "'$RP_PYTHON -m venv' failed, see above."
    if [[ $share == yes && ${#flags[@]} -eq 0 ]]; then
        "$RP_PYTHON" - >"$("$RP_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared_torch.pth" <<'PY'
import os, sys, torch
folders = [os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))]
folders += [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
print("\n".join(dict.fromkeys(folders)))
PY
    fi
}

rp_setup() {
    local stamp
    RP_ROOT=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    RP_VENV=$RP_ROOT/.venv
    RP_UNFINISHED=rpruntime-unfinished # there while an install runs: if it is found, that run was cut off
    cd "$RP_ROOT" || exit
    # pip ends on Ctrl-C as if it had failed; without this the mark of the unfinished install would be taken away.
    trap 'exit 130' INT
    unset PYTHONHOME
    export PIP_USER=0 # a user's pip settings may say otherwise, which no virtual environment takes

    # Two runs at once: the second waits, then finds everything done.
    exec {RP_LOCK}>>"$RP_ROOT/.venv.lock"
    if command -v flock >/dev/null && ! flock -n "$RP_LOCK"; then
        rp_say "waiting for another run that is setting up .venv ..."
        flock "$RP_LOCK"
    fi

    # The path is part of the stamp: a project moved elsewhere is installed again. This file says what is installed, too.
    stamp=$({ printf '%s\n' "$RP_ROOT"; cat "$RP_ROOT/setup.cfg" "$RP_ROOT/scripts/setup_env.sh"; } | cksum)
    if [[ -e $RP_VENV/$RP_UNFINISHED ]] ||
        ! "$RP_VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        rp_make_venv
    fi
    if [[ $(cat "$RP_VENV/rpruntime-stamp" 2>/dev/null) != "$stamp" ]] || ! rp_torch_fits "$RP_VENV/bin/python"; then
        : >"$RP_VENV/$RP_UNFINISHED"
        rp_install || {
            rm -f "$RP_VENV/$RP_UNFINISHED"
            rp_die "the environment is not complete; the next run goes on from here."
        }
        printf '%s\n' "$stamp" >"$RP_VENV/rpruntime-stamp"
        rm -f "$RP_VENV/$RP_UNFINISHED"
        rp_say "ready ($SECONDS s)"
    fi

    exec {RP_LOCK}>&- # frees the lock; what runs next must not hold it
    trap - INT
    export VIRTUAL_ENV=$RP_VENV PATH=$RP_VENV/bin:$PATH
}

rp_install() {
    local torch
    torch=$(sed -n 's/^ *\(torch>=[0-9.,<]*\) *$/\1/p' "$RP_ROOT/setup.cfg")
    rp_pip 'pip>=22.3' || return # older ones cannot install this project editable; no network if it is new enough
    if ! rp_torch_fits "$RP_VENV/bin/python"; then
        rp_say "installing torch (a CPU build is ~200 MB, a CUDA build several GB) ..."
        rp_pip "$torch" numpy || return
    fi
    rp_say "installing rpruntime (editable) with its other packages and the test tools ..."
    rp_pip --editable '.[test,hf]' || return
    # The other supported major version, for tests alone, where nothing else finds it.
    if [[ ! -d $RP_VENV/transformers4/transformers ]]; then
        rm -rf -- "$RP_VENV/transformers4"
        rp_say "installing transformers 4 in a folder of its own, for tests ..."
        rp_pip --target "$RP_VENV/transformers4" 'transformers>=4.57,<5' || return
    fi
}

rp_setup
