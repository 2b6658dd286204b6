#!/usr/bin/env python3
"""Makes tests/vectors/ggml_blocks.json: random ggml blocks and the weights that numpy code independent of ours
(PyPI `gguf`) decodes them to.

    python3 -m venv venv && venv/bin/pip install gguf==0.19.0
    venv/bin/python scripts/make_ggml_vectors.py > tests/vectors/ggml_blocks.json
"""

import json
from importlib.metadata import version

import gguf
import numpy as np

# Where the halves of a block are (d, and dmin or m): random bytes there would often be NaN or infinite.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip

rng = np.random.default_rng(20260)
types = []
for name, halves in HALVES.items():
    kind = gguf.GGMLQuantizationType[name]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    count = 4 if weights == 256 else 8
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in halves:
        # Any finite half: both signs, subnormals included.
        bits = rng.integers(0, 0x7C00, count, dtype=np.uint16) | rng.integers(0, 2, count, dtype=np.uint16) << 15
        blocks[:, at : at + 2] = bits.astype("<u2").view(np.uint8).reshape(count, 2)
    blocks[0] = 255  # every field at its largest, with d = 1 ...
    for at in halves:
        blocks[0, at : at + 2] = [0x00, 0x3C]
    blocks[1, [i for i in range(size) if not any(at <= i < at + 2 for at in halves)]] = 0  # ... and at its smallest
    decoded = gguf.quants.dequantize(blocks, kind).astype("<f4")
    assert decoded.shape == (count, weights) and np.isfinite(decoded).all()
    types.append({
        "name": name, "id": int(kind), "weights": weights, "bytes": size,
        "blocks": [b.tobytes().hex() for b in blocks], "f32": [d.tobytes().hex() for d in decoded],
    })  # fmt: skip

print(json.dumps({"source": f"gguf {version('gguf')}, numpy {np.__version__}", "types": types}, indent=1))
