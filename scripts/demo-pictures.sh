#!/usr/bin/env bash
# Draws the pictures of README.md with the built-in demo model.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/deps.sh"

need_build_tools
cd "$(repo_root)"
cargo build --release --locked --package sd-cli

prompts=(
  "a red circle on a blue background"
  "a large yellow star on a black background"
  "a green ring in the top left on a white background"
  "a pink heart, white background"
  "a cyan diamond on a striped brown background"
  "a blue square left of a pink triangle on a yellow background"
  "an orange cross at the bottom on a purple background"
  "a purple triangle on a gradient green background"
)
for i in "${!prompts[@]}"; do
  "${CARGO_TARGET_DIR:-target}/release/sd-cli" --prompt "${prompts[i]}" --output "docs/images/demo-$((i + 1)).png"
done
