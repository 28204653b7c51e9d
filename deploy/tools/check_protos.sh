#!/usr/bin/env bash
# Fail when the committed code is not what the .proto files generate.
set -euo pipefail
cd "$(dirname "$0")/../.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
deploy/tools/protos.sh "$fresh"
for file in "$fresh"/forebay/v1/*; do
  cmp -s "$file" "protos/forebay/v1/$(basename "$file")" || { echo "protos/forebay/v1/$(basename "$file") is stale: run make protos" >&2; exit 1; }
done
echo "generated code is current"
