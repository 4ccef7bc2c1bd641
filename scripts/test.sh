#!/usr/bin/env bash
# Lint, format, types and tests; every part runs even if one fails, the summary comes last.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: scripts/test.sh [--all] [-- pytest arguments]

Makes or reuses .venv in the project root, then runs ruff check, ruff format --check, mypy and pytest.
  --all    the tests marked slow too
  -- ...   what follows goes to pytest: scripts/test.sh -- -x -k partition
Variables: PYTHON (the Python 3.10+ to build .venv from). Exit status: 0 all well, 1 some part failed, 2 wrong usage.
HELP
}

selection=(-m "not slow")
while (($#)); do
    case $1 in
        --all) selection=() ;;
        -h | --help) usage; exit 0 ;;
        --) shift; break ;;
        *) echo "test.sh: unknown argument '$1' (arguments for pytest go after --)" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# pytest and mypy end in their own way on Ctrl-C; without this the next part would start.
trap 'exit 130' INT

summary=()
failed=0
part() { # NAME COMMAND...
    local name=$1 start=$SECONDS status=0 verdict
    shift
    printf '\n== %s\n' "$name"
    "$@" || status=$?
    if ((status)); then verdict="FAILED (exit $status)" failed=1; else verdict=ok; fi
    summary+=("$(printf '%-8s %4d s  %s' "$name" $((SECONDS - start)) "$verdict")")
}

# The tests start hundreds of processes; without kept bytecode each compiles the project anew.
unset PYTHONDONTWRITEBYTECODE

part lint python -m ruff check .
part format python -m ruff format --check .
part types python -m mypy rpruntime launcher
part tests python -m pytest "${selection[@]}" "$@"

printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
