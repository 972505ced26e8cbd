#!/usr/bin/env bash
# Everything a change must pass. Every step is about the whole workspace in the debug profile: another choice of packages has
# other features, and ggml would be built once more.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib/deps.sh"

need_build_tools curl # the examples of docs/server.md
need_lint_tools
cd "$(repo_root)"

step() {
  say "== $*"
  local start=$SECONDS
  "$@"
  say "== took $((SECONDS - start)) s"
}

smoke() {
  local dir
  dir=$(mktemp -d)
  "${CARGO_TARGET_DIR:-target}/debug/sd-cli" --prompt "a green star" --steps 4 --output "$dir/smoke.png"
  [ "$(head -c 8 "$dir/smoke.png" | od -An -tx1 | tr -d ' \n')" = 89504e470d0a1a0a ] || die "sd-cli wrote no PNG"
  rm -r "$dir"
}

step cargo fmt --all --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo test --workspace --locked
RUSTDOCFLAGS="-D warnings" step cargo doc --workspace --no-deps --locked
step smoke
say "all passed"
