#!/usr/bin/env bash
# Guess: one picture and one set of settings make the same grid of patches, so the same number of image tokens, in
# transformers (Python) and in transformers.js: the second says that it is made to be equal to the first.
# Instead (transformers 5.24.0, @huggingface/transformers 4.3.2): sides are rounded to a multiple of 28 pixels (Qwen2-VL,
# Qwen2.5-VL) or 32 (Qwen3-VL), and a side that lies half-way between two multiples goes to the even one in Python, and
# up in JavaScript. A screenshot of 1280 x 720 has 880 tokens in Python for Qwen3-VL, and 920 in JavaScript.
# Hurts: whoever counts or prepares pictures in a browser or in Node for a model that was trained, or is served, with
# Python: the budget of a context is wrong, and so is each position behind the picture.
# Here: the router computes no picture. It learns the length of each one from the ids that the engine returns; its
# estimate for pictures that no engine has seen rounds as Python does.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 pillow==13.0.0 numpy==2.4.6
npm install --silent --ignore-scripts --prefix "$tmp" @huggingface/transformers@4.3.2 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/grids.mjs" <<'JS'
import { Qwen2VLImageProcessor, RawImage } from '@huggingface/transformers';
import { readFileSync } from 'node:fs';
const { settings, sizes } = JSON.parse(readFileSync(0, 'utf8'));
const grids = [];
for (const one of settings) {
  const processor = new Qwen2VLImageProcessor(one);
  for (const [width, height] of sizes) {
    const picture = new RawImage(new Uint8ClampedArray(width * height * 3).fill(120), width, height, 3);
    const { image_grid_thw } = await processor([picture]);
    grids.push(image_grid_thw.tolist()[0].map(Number));
  }
}
process.stdout.write(JSON.stringify(grids));
JS
"$tmp/venv/bin/python" - "$tmp/grids.mjs" 2>"$tmp/python.log" <<'PY' || { cat "$tmp/python.log"; exit 1; }
import json
import subprocess
import sys
from importlib.metadata import version

from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SHARED = {"temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SHARED |= {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3}
PATCHES = {"Qwen2.5-VL": 14, "Qwen3-VL": 16}
SIZES = [(1280, 720), (640, 480), (350, 210), (70, 70), (1000, 600)]
LIMITS = {"shortest_edge": 3136, "longest_edge": 12845056}

settings = [SHARED | {"patch_size": one, "min_pixels": 3136, "max_pixels": 12845056} for one in PATCHES.values()]
body = json.dumps({"settings": settings, "sizes": SIZES})
told = subprocess.run(["node", sys.argv[1]], input=body, capture_output=True, text=True, check=True).stdout
javascript = iter(json.loads(told))
print("transformers", version("transformers"), "@huggingface/transformers 4.3.2")
differ = set()
for model, patch in PATCHES.items():
    processor = Qwen2VLImageProcessorPil(**SHARED, patch_size=patch, size=LIMITS)
    for size in SIZES:
        picture = Image.new("RGB", size, (120, 120, 120))
        python = processor([picture], return_tensors="np")["image_grid_thw"].tolist()[0]
        other = next(javascript)
        counts = [rows * columns // 4 for _, rows, columns in (python, other)]
        print(f"{model:10} {size[0]:4} x {size[1]:3}: {counts[0]} tokens in Python, {counts[1]} in JavaScript")
        if python != other:
            differ.add((model, *size, *counts))
expected = {("Qwen3-VL", 1280, 720, 880, 920), ("Qwen2.5-VL", 350, 210, 96, 104), ("Qwen2.5-VL", 70, 70, 4, 9)}
sys.exit(0 if differ == expected else f"changed: {differ}")
PY
