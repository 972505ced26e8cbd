#!/usr/bin/env bash
# Builds sd-cli and draws out.png with the model that is built in.
# usage: scripts/quickstart.sh [prompt]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/deps.sh"

prompt=${1:-a red circle on a blue background}
out=$PWD/out.png
need_build_tools
cd "$(repo_root)"
say "building sd-cli (the first build takes some minutes, most of it ggml)"
cargo build --release --locked --package sd-cli
say "drawing: $prompt"
cargo run --quiet --release --locked --package sd-cli -- --prompt "$prompt" --output "$out"
say "done: $out"
