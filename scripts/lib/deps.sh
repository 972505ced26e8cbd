# Sourced by the other scripts. Makes sure that the tools a build needs are there, and installs the missing ones on Debian
# and Ubuntu. `need_build_tools` returns only when a build can start, and when the commands named to it, which are their own
# packages, are there.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

repo_root() { cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd; }

need_rust() {
  if ! command -v cargo >/dev/null 2>&1 && [ -f "${CARGO_HOME:-$HOME/.cargo}/env" ]; then
    # A fresh rustup install is on the path only of shells that were started after it.
    . "${CARGO_HOME:-$HOME/.cargo}/env"
  fi
  command -v cargo >/dev/null 2>&1 || die "cargo is missing; install Rust from https://rustup.rs and run this again"
  local want have
  want=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$(repo_root)/Cargo.toml")
  have=$(cargo --version | cut -d' ' -f2)
  if [ "$(printf '%s\n' "$want" "$have" | sort -V | head -n 1)" != "$want" ]; then
    die "Rust $have is too old, this needs $want or newer; run: rustup update stable"
  fi
}

has_libclang() {
  [ -n "${LIBCLANG_PATH:-}" ] && return 0
  local file
  for file in /usr/lib/llvm-*/lib /usr/lib /usr/lib64 /usr/lib/*-linux-gnu /usr/local/lib; do
    # Not libclang-cpp, which is another library.
    compgen -G "$file/libclang.so*" >/dev/null && return 0
    compgen -G "$file/libclang-[0-9]*.so*" >/dev/null && return 0
  done
  for file in /opt/homebrew/opt/llvm/lib/libclang.dylib /Library/Developer/CommandLineTools/usr/lib/libclang.dylib; do
    [ -e "$file" ] && return 0
  done
  return 1
}

need_build_tools() {
  need_rust
  local missing=()
  command -v cmake >/dev/null 2>&1 || missing+=(cmake)
  command -v c++ >/dev/null 2>&1 || missing+=(g++)
  command -v make >/dev/null 2>&1 || command -v ninja >/dev/null 2>&1 || missing+=(make)
  has_libclang || missing+=(libclang-dev)
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null 2>&1 || missing+=("$tool")
  done
  [ ${#missing[@]} -eq 0 ] && return 0

  command -v apt-get >/dev/null 2>&1 ||
    die "missing here, by their Debian names: ${missing[*]}; install them and run this again"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 ||
      die "missing: ${missing[*]}; as root, run: apt-get update && apt-get install -y ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq >&2 || die "apt-get update failed"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2 ||
    die "could not install ${missing[*]}"
}

need_lint_tools() {
  local component
  for component in fmt:rustfmt clippy:clippy; do
    cargo "${component%%:*}" --version >/dev/null 2>&1 && continue
    command -v rustup >/dev/null 2>&1 || die "cargo ${component%%:*} is missing"
    rustup component add "${component##*:}" >&2 || die "could not add ${component##*:}"
  done
}
