"""The rule of a family against transformers' own image processors, and the files that name its sizes."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.media.errors import MediaInvalidError
from middleware_hub.media.family import Family, UnsupportedFamily
from middleware_hub.media.family_files import load_family
from router.errors import BadRequestError

QWEN_2 = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
QWEN_3 = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
GLM = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
}
SIZES = {
    # (width, height): tokens in each family, as transformers 5.19 counts them
    (1, 1): (4, 64, 9),
    (28, 28): (4, 64, 9),
    (640, 480): (391, 300, 391),
    (1920, 1080): (2691, 2040, 2691),
    (1080, 1920): (2691, 2040, 2691),
    (333, 77): (36, 68, 36),
    (42, 14): (8, 70, 10),
    (5000, 4000): (16302, 16302, 6090),
    (3, 600): (29, 114, 200),
    (200, 1): (29, 114, 200),
}


def model(folder: Path, model_type: str, images: dict[str, Any], nested: bool = False, **config: Any) -> str:
    config = {"model_type": model_type, "image_token_id": 151655, "vision_config": {"depth": 2}, **config}
    (folder / "config.json").write_text(json.dumps(config))
    if nested:
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": images}))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return str(folder)


def family(folder: Path, model_type: str, images: dict[str, Any], **more: Any) -> Family:
    found = load_family(model(folder, model_type, images, **more))
    assert isinstance(found, Family)
    return found


ORACLE = """
import json, sys, torch
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
for kind, images, sizes in json.load(sys.stdin):
    processor = (Glm4vImageProcessor if kind == "glm4v" else Qwen2VLImageProcessor)(**images)
    grids = [processor(images=[torch.zeros(3, h, w, dtype=torch.uint8)], return_tensors="pt")["image_grid_thw"][0]
             for w, h in sizes]
    print(json.dumps([int(grid.prod()) // 4 for grid in grids]))
"""
FAMILIES = [("qwen2_5_vl", QWEN_2), ("qwen3_vl", QWEN_3), ("glm4v", GLM)]


def counted(sizes: list[tuple[int, int]]) -> list[list[int]]:
    """What transformers counts for each family."""
    folder = Path(os.environ.get("TITO_SGLANG_DIR", Path.home() / ".cache/tito-router/sglang-0.5.23"))
    python = folder / "venv/bin/python"
    if not python.exists():
        pytest.skip("the image processors need the packages of a real SGLang with images: tests/vlm_cpu/setup.sh")
    asked = json.dumps([(kind, images, sizes) for kind, images in FAMILIES])
    done = subprocess.run(
        [python, "-W", "ignore", "-c", ORACLE], input=asked, text=True, stdout=subprocess.PIPE, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sglang
@pytest.mark.vlm
def test_the_estimate_is_what_transformers_counts(tmp_path: Path) -> None:
    draw, sizes = random.Random(3), list(SIZES)
    while len(sizes) < 400:
        width, height = (int(2 ** draw.uniform(0, 10.5)) for _ in range(2))
        if max(width, height) <= 200 * min(width, height):
            sizes.append((width, height))
    for (kind, images), tokens in zip(FAMILIES, counted(sizes), strict=True):
        rule = family(tmp_path, kind, images)
        assert [rule.estimate(*size) for size in sizes] == tokens, kind


@pytest.mark.parametrize("size", SIZES)
def test_recorded_sizes_are_counted_as_transformers_counted_them(tmp_path: Path, size: tuple[int, int]) -> None:
    found = tuple(family(tmp_path, kind, images).estimate(*size) for kind, images in FAMILIES)
    assert found == SIZES[size]


def test_unequal_sides_are_refused(tmp_path: Path) -> None:
    rule = family(tmp_path, "qwen2_5_vl", QWEN_2)
    with pytest.raises(MediaInvalidError, match="more than 200 times"):
        rule.estimate(201, 1)


def test_a_family_says_what_its_files_say(tmp_path: Path) -> None:
    found = family(tmp_path, "qwen3_vl", QWEN_3)
    assert (found.model_type, found.placeholder, found.placeholder_id) == ("qwen3_vl", "<|image_pad|>", 151655)
    assert (found.factor, found.min_pixels, found.max_pixels, found.least) == (32, 65536, 16777216, 4)


def test_old_and_new_files_say_the_same(tmp_path: Path) -> None:
    sizes = {"shortest_edge": 3136, "longest_edge": 12845056}
    old = family(tmp_path, "qwen2_vl", QWEN_2)
    new = family(tmp_path, "qwen2_vl", {"patch_size": 14, "merge_size": 2, "size": sizes}, nested=True)
    assert (old.factor, old.min_pixels, old.max_pixels) == (new.factor, new.min_pixels, new.max_pixels)
    # Beside a new file, the old one is not read: the sizes are those that transformers finds.
    assert family(tmp_path, "qwen2_vl", {**QWEN_2, "max_pixels": 4000}) == new


def test_a_family_that_makes_fewer_tokens_says_so(tmp_path: Path) -> None:
    """Never 1: that is what is left of an image that an engine has dropped."""
    assert family(tmp_path, "qwen2_vl", {**QWEN_2, "min_pixels": 3 * 784}).least == 3
    assert family(tmp_path, "qwen2_vl", {**QWEN_2, "min_pixels": 784}).least == 2


KIMI = {"patch_size": 14, "merge_kernel_size": [2, 2], "in_token_limit": 4096}
KIMI_SIZES = {  # (width, height): tokens, as vLLM 0.32 counts them
    **{(1, 1): 1, (28, 28): 1, (29, 28): 2, (640, 480): 414, (1920, 1080): 1032},
    **{(333, 77): 36, (5000, 4000): 1044, (3, 600): 22},
}


def test_kimis_files_have_names_of_their_own(tmp_path: Path) -> None:
    found = family(tmp_path, "kimi_vl", KIMI, media_placeholder_token_id=163605)
    assert (found.placeholder, found.placeholder_id, found.least) == ("<|media_pad|>", 163605, 2)
    assert {size: found.estimate(*size) for size in KIMI_SIZES} == KIMI_SIZES
    other = family(tmp_path, "kimi_vl", {**KIMI, "in_token_limit": 9}, media_placeholder_token_id=163605)
    assert other.settings != found.settings
    assert other.estimate(640, 480) < 9


@pytest.mark.parametrize(
    "images", [{}, {**KIMI, "in_token_limit": 0}, {**KIMI, "merge_kernel_size": [2, 1]}, {**KIMI, "patch_size": None}]
)
def test_kimis_sizes_are_not_guessed(tmp_path: Path, images: dict[str, Any]) -> None:
    assert isinstance(
        load_family(model(tmp_path, "kimi_vl", images, media_placeholder_token_id=163605)), UnsupportedFamily
    )


def test_lengths_of_other_settings_are_kept_apart_and_a_new_save_changes_nothing(tmp_path: Path) -> None:
    first = family(tmp_path, "qwen2_vl", QWEN_2, dtype="float32", transformers_version="5.1")
    assert family(tmp_path, "qwen2_vl", QWEN_2, dtype="bfloat16", transformers_version="5.2").settings == first.settings
    assert family(tmp_path, "qwen2_5_vl", QWEN_2).settings != first.settings
    assert family(tmp_path, "qwen2_vl", {**QWEN_2, "max_pixels": 4000}).settings != first.settings
    assert family(tmp_path, "qwen2_vl", QWEN_2, vision_config={"depth": 3}).settings != first.settings


@pytest.mark.parametrize("config", [None, {"model_type": "qwen3"}])
def test_a_model_of_text_has_no_family(tmp_path: Path, config: object) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_family(str(tmp_path)) is None


def test_another_family_is_named(tmp_path: Path) -> None:
    found = load_family(model(tmp_path, "gemma3", {}))
    assert isinstance(found, UnsupportedFamily)
    assert found.model_type == "gemma3"


@pytest.mark.parametrize(
    ("images", "config"),
    [
        ({}, {}),
        ({"patch_size": 14, "merge_size": 2}, {}),
        ({**QWEN_2, "min_pixels": 0}, {}),
        ({**QWEN_2, "min_pixels": "many"}, {}),
        ({**QWEN_2, "patch_size": 0}, {}),
        ({**QWEN_2, "max_pixels": 3}, {}),
        (QWEN_2, {"image_token_id": None}),
    ],
)
def test_nothing_is_guessed(tmp_path: Path, images: dict[str, Any], config: dict[str, Any]) -> None:
    assert isinstance(load_family(model(tmp_path, "qwen2_vl", images, **config)), UnsupportedFamily)


def test_a_file_that_is_no_json_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadRequestError, match=r"config\.json"):
        load_family(str(tmp_path))


def test_the_embedded_workers_model_is_known() -> None:
    folder = Path(__file__).parents[3] / "worker/models/data/tokenizer-images"
    found = load_family(str(folder))
    assert isinstance(found, Family)
    assert (found.factor, found.least) == (28, 4)
