#!/usr/bin/env bash
# The GPU kit in one call, from a bare checkout, without network:
#   bash benchmarks/gpu/run.sh [--wheels DIR] [--out DIR] [--device cuda:0|cpu] [--quick] [--budget-s 300]
# --wheels: a folder of wheels that this host lacks (DALI, hydra-core, obstore, xxhash …); they are unpacked beside the
# results and leave the host's Python as it is. Results: kit.json, kit.md and gpu-tests.xml in --out ($OUT, else ./gpu-kit).
# Exit code 0: every check held and every test marked `gpu` ran; 1 otherwise.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$PWD/gpu-kit}
wheels=
rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=${2:?--wheels needs a folder} && shift 2 ;;
    --out) out=${2:?--out needs a folder} && shift 2 ;;
    *) rest+=("$1") && shift ;;
  esac
done
mkdir -p "$out"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$wheels" ]; then
  compgen -G "$wheels/*.whl" >/dev/null || { echo "run.sh: no wheel in $wheels" >&2; exit 2; }
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  # A wheel is a zip of what goes on the path; unpacking needs no pip, which a host may lack.
  for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
  PYTHONPATH=$site:$PYTHONPATH
fi
cd "$root"
"$python" -m benchmarks.gpu --out "$out" "${rest[@]}"
