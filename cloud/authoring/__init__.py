"""Where releases are built: models are fetched, converted, quantized and bound into a release.

Needs the `build` extra for conversion and quantization; both run in child processes, so importing this
package brings in neither torch nor transformers. Nothing here is needed on an edge node.
"""
