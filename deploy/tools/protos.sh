#!/usr/bin/env bash
# Generate Python code from the .proto files. The files live under protos/forebay/v1, as buf wants them,
# while the import package is `protos.forebay.v1`: the generated imports are rewritten to say so.
#   deploy/tools/protos.sh [OUT]    OUT defaults to protos/
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-protos}
python=${PYTHON:-.venv/bin/python}
PATH="$(cd "$(dirname "$python")" && pwd):$PATH"
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" protos/forebay/v1/*.proto
sed -i -E 's/^from forebay\.v1 import/from protos.forebay.v1 import/; s/^import forebay\.v1\.([a-z0-9_]+)/import protos.forebay.v1.\1/; s/([^.a-z])forebay\.v1\.([a-z]+_pb2)/\1protos.forebay.v1.\2/g' \
  "$out"/forebay/v1/*_pb2*.py "$out"/forebay/v1/*_pb2*.pyi
rm -f "$out"/forebay/v1/common_pb2_grpc.py "$out"/forebay/v1/common_pb2_grpc.pyi  # no service in it
