#!/usr/bin/env bash
# Guess: samples that WebDataset's writer took come back from its reader as they were: as many, with the keys they were given.
# Instead (webdataset 1.0.2, datasets 5.2.0): a key ends at its first dot. Samples of `qwen2.5-7b-0000` to `qwen2.5-7b-0002` are
# three in the file and one when read: `qwen2`, with fields such as `5-7b-0001.json`. Both readers do so, without an error.
# WebDataset's reader also makes the names of fields lower-case (`Reward.json` is `reward.json`), that of datasets keeps them.
# Hurts: rollouts that are named after a model (Qwen2.5, Llama-3.1), a version or a temperature: of a shard one sample is left, and
# a loop with `if "json" in sample`, or a handler that goes on, trains on none. A count of files or bytes shows nothing.
# Here: the store writes no shards of this kind; its rows have a column for each identity.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check webdataset==1.0.2 datasets==5.2.0 pyarrow==26.0.1
HF_HOME="$tmp/home" "$tmp/venv/bin/python" - "$tmp" <<'PY'
import sys
import tarfile
from importlib.metadata import version

import datasets
import webdataset

datasets.disable_progress_bars()


def shard(stem: str) -> str:
    file = f"{sys.argv[1]}/{stem}.tar"
    with webdataset.TarWriter(file) as writer:
        for number in range(3):
            writer.write({"__key__": f"{stem}-{number:04}", "json": {"tokens": [number]}, "Reward.json": 1.0})
    return file


def fields(sample: dict) -> list[str]:
    return sorted(name for name in sample if not name.startswith("__"))


print("webdataset", version("webdataset"), "datasets", version("datasets"))
found = {}
for stem in ("qwen2-7b", "qwen2.5-7b"):
    file = shard(stem)
    with tarfile.open(file) as archive:
        print(f"{stem}: {len(archive.getnames())} files, the first", archive.getnames()[0])
    own = list(webdataset.WebDataset(file, shardshuffle=False).decode())
    other = datasets.load_dataset("webdataset", data_files=file, split="train", keep_in_memory=True).to_list()
    for reader, samples in (("webdataset", own), ("datasets", other)):
        found[stem, reader] = [one["__key__"] for one in samples], fields(samples[0])
        print(f"  {reader:10} keys {found[stem, reader][0]}\n             fields {found[stem, reader][1]}")
three = [f"qwen2-7b-{number:04}" for number in range(3)]
cut = [f"5-7b-{number:04}.{name}" for number in range(3) for name in ("Reward.json", "json")]
SEEN = {
    ("qwen2-7b", "webdataset"): (three, ["json", "reward.json"]),
    ("qwen2-7b", "datasets"): (three, ["Reward.json", "json"]),
    ("qwen2.5-7b", "webdataset"): (["qwen2"], sorted(name.lower() for name in cut)),
    ("qwen2.5-7b", "datasets"): (["qwen2"], sorted(cut)),
}
sys.exit("changed" if found != SEEN else 0)
PY
