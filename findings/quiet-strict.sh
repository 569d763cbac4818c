#!/usr/bin/env bash
# Guess: `mkdocs build --strict --quiet` prints less, and still fails on a page that links a page, an anchor or a picture that
# is not there, as `--strict` alone does.
# Instead (mkdocs 1.6.1, mkdocs-material 9.8.2): it succeeds. `--quiet` sets the logger to errors, and `--strict` counts the
# warnings that the logger lets through. And the plugin `offline` of mkdocs-material, which is to make a site that needs no network,
# has every page load a script for the search from unpkg.com.
# Hurts: a CI that keeps its log short checks no link. The search of an offline site finds nothing where there is no network.
# Here: `make docs` is not quiet, and the site has a script of its own in place of that one.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q --disable-pip-version-check mkdocs==1.6.1 mkdocs-material==9.8.2 >"$tmp/pip.log" 2>&1 || {
  cat "$tmp/pip.log"
  exit 1
}
mkdir "$tmp/docs"
printf '# A\n\n[no page](b.md), [no anchor](#b), ![no picture](b.png)\n' >"$tmp/docs/index.md"
cat >"$tmp/mkdocs.yml" <<'YML'
site_name: a
theme: material
plugins: [search, offline]
validation: {anchors: warn}
YML
export NO_MKDOCS_2_WARNING=1
built() {
  "$tmp/venv/bin/python" -m mkdocs build -f "$tmp/mkdocs.yml" "$@" >/dev/null 2>&1 && echo succeeds || echo fails
}
loud=$(built --strict)
quiet=$(built --strict --quiet)
script=$(grep -o 'https://unpkg.com/[a-z/-]*' "$tmp/site/index.html" || true)
echo "mkdocs 1.6.1, mkdocs-material 9.8.2; a page with three links that lead nowhere:"
echo "  --strict          $loud"
echo "  --strict --quiet  $quiet"
echo "of a site made with the plugin offline, each page loads: ${script:-nothing}"
[ "$loud $quiet $script" = "fails succeeds https://unpkg.com/iframe-worker/shim" ] || { echo changed; exit 1; }
