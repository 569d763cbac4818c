#!/usr/bin/env bash
# Guess: an image processor of transformers makes the same pixels of a file, whether it gets the opened picture or `load_image`
# opened it, which `apply_chat_template` uses for addresses and data URLs; and engines make these pixels, too.
# Instead (transformers 5.24.0, pillow 13.0.0, mistral-common 1.13.1): a picture with transparent parts is two pictures. The
# processors of Qwen2-VL, Gemma 3, Idefics3, LLaVA-NeXT and Pixtral paint what is transparent white, and so does mistral-common.
# `load_image` drops the transparency first, so that the colour shows that lies hidden there: a plot with black lines on nothing is
# a black rectangle. By its source vLLM 0.32.0 paints white, SGLang 0.5.23 for most models shows the hidden colour.
# Hurts: plots, icons and screenshots of windows. The policy sees lines, and the trainer computes its probabilities on black, or
# the reverse. The number of image tokens is the same, so no check of shapes or counts finds it.
# Here: the integrations warn of a sequence with such a picture. Send pictures without transparency.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check transformers==5.24.0 pillow==13.0.0 numpy==2.3.5 \
  "mistral-common[image]==1.13.1"
TRANSFORMERS_VERBOSITY=error "$tmp/venv/bin/python" - <<'PY'
import base64
import importlib
import io
import sys
from importlib.metadata import version

import numpy
from mistral_common.protocol.instruct.chunk import ImageURL, ImageURLChunk
from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder, SpecialImageIDs
from PIL import Image, ImageDraw
from transformers.image_utils import load_image

PROCESSORS = {"qwen2_vl": "Qwen2VL", "gemma3": "Gemma3", "idefics3": "Idefics3", "llava_next": "LlavaNext", "pixtral": "Pixtral"}
drawn = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
ImageDraw.Draw(drawn).rectangle((8, 8, 24, 24), fill=(0, 0, 0, 255))
stream = io.BytesIO()
drawn.save(stream, "PNG")
URL = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def colours(values) -> str:
    """Black is the least value of a normalised picture, and white the greatest."""
    return "black and white" if numpy.ptp(numpy.asarray(values[0])) > 1 else "black only"


def seen(module: str, name: str, picture: Image.Image) -> str:
    file = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    values = getattr(file, f"{name}ImageProcessorPil")()(picture)["pixel_values"]
    return colours(numpy.asarray(values).reshape(1, -1))


print(f"transformers {version('transformers')}, pillow {version('pillow')}, mistral-common {version('mistral-common')}")
found = {}
for module, name in PROCESSORS.items():
    found[module] = (seen(module, name, Image.open(stream)), seen(module, name, load_image(URL)))
    print(f"{module:15} opened: {found[module][0]:16} load_image: {found[module][1]}")
encoder = ImageEncoder(ImageConfig(image_patch_size=16, max_image_size=1024), SpecialImageIDs(10, 12, 13))
mistral = colours(encoder(ImageURLChunk(image_url=ImageURL(url=URL))).image)
print(f"mistral-common  by URL: {mistral}")
expected = dict.fromkeys(PROCESSORS, ("black and white", "black only"))
sys.exit("changed" if (found, mistral) != (expected, "black and white") else 0)
PY
