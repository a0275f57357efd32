#!/usr/bin/env bash
# Writes docs/benchmarks/NAME.json and NAME.png: all cases, all peers that are installed.
#
#   benchmarks/run.sh NAME [arguments of python -m lossops.bench]
set -euo pipefail
name=${1:?usage: benchmarks/run.sh NAME [ARGUMENT ...]}
shift
cd "$(dirname "$0")/.."
mkdir -p docs/benchmarks

# A graph that was compiled for another build of lossops would be found again by its operators.
export TORCHINDUCTOR_FORCE_DISABLE_CACHES=1
python=${PYTHON:-python3}
"$python" -m lossops.info
exec "$python" -m lossops.bench --output "docs/benchmarks/$name.json" "$@"
