#!/usr/bin/env bash
# Trains the example GPT with rplaunch; makes the environment first if need be.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then
    cat <<'HELP'
usage: scripts/demo.sh [arguments of examples/train_gpt.py]

Makes or reuses .venv in the project root, then runs
    rplaunch examples/train_gpt.py [arguments]
there. The script's own options: scripts/demo.sh -- --help
Variables: PYTHON (the Python 3.10+ to build .venv from), RPRUNTIME_* (see rplaunch --help).
HELP
    exit 0
fi
if [[ ${1-} == -- ]]; then shift; fi

# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
exec rplaunch examples/train_gpt.py "$@"
