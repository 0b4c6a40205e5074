# Sourced by run, test and lab/bare in the repository's root. Finds their dependencies, and installs the missing ones.
#
#   bootstrap WHAT...          build: a Rust toolchain and linkers; test; programs; pyverbs; instructions; lab; aarch64; bench; bare; container
#   bootstrap_missing WHAT...  prints the packages that bootstrap would install

rust_wanted=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)

have() { command -v "$1" >/dev/null 2>&1; }
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

# A toolchain that satisfies rust-version is used as it is: the one in PATH, rustup's, a versioned one of Ubuntu, or the distribution's, which
# a rustup without a toolchain may hide in PATH.
find_rust() {
  local dir version
  for dir in "" "${CARGO_HOME:-${HOME:-/root}/.cargo}/bin" $(printf '%s\n' /usr/lib/rust-*/bin | sort -rV) /usr/bin; do
    version=$(PATH=${dir:+$dir:}$PATH; have cargo && cargo --version >/dev/null 2>&1 && rustc --version 2>/dev/null) || continue
    version=${version#rustc }
    at_least "${version%% *}" "$rust_wanted" || continue
    PATH=${dir:+$dir:}$PATH
    return
  done
  return 1
}

candidate() { apt-cache policy "$1" 2>/dev/null | sed -n 's/^  Candidate: \([^(].*\)$/\1/p'; }

# Prints the distribution's own pair, if one is new enough, else nothing: then rustup's installer is used.
rust_packages() {
  local pair number
  for pair in "rustc cargo" "rustc-web cargo-web" \
    $(apt-cache pkgnames rustc-1. 2>/dev/null | grep -E '^rustc-1\.[0-9]+$' | sort -rV | sed 's/^rustc-\(.*\)/rustc-\1,cargo-\1/'); do
    set -- ${pair/,/ }
    number=$(candidate "$1")
    [ -n "$number" ] && [ -n "$(candidate "$2")" ] && at_least "$number" "$rust_wanted" || continue
    echo "$@"
    # The formatter and the linter have names of their own in each family; either may be missing.
    case $1 in
      rustc) set -- rustfmt rust-clippy ;;
      rustc-web) set -- rustfmt-web rust-clippy-web ;;
      *) set -- "rustfmt-${1#rustc-}" "rust-${1#rustc-}-clippy" ;;
    esac
    for pair; do [ -z "$(candidate "$pair")" ] || echo "$pair"; done
    return
  done
}

bootstrap_missing() {
  local what packages
  for what; do
    case $what in
      build)
        have cc || echo gcc libc6-dev
        [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
        # The linker LLD comes with rustup's toolchains.
        if find_rust; then
          [ -e "$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin/gcc-ld/ld.lld" ] || have ld.lld || echo lld
        else
          packages=$(rust_packages)
          [ -z "$packages" ] || echo "$packages" lld
        fi ;;
      test)
        have ip || echo iproute2
        have tshark || echo tshark
        have strace || echo strace
        have pkg-config || echo pkgconf
        # Elsewhere the package is missing, or a snap.
        have chromium || ! grep -qx ID=debian /etc/os-release 2>/dev/null || echo chromium ;;
      programs)
        [ -e /usr/include/infiniband/verbs.h ] || echo libibverbs-dev
        [ -e /usr/include/rdma/rdma_cma.h ] || echo librdmacm-dev
        have ibv_rc_pingpong || echo ibverbs-utils
        have rping || echo rdmacm-utils
        have ib_write_lat || echo perftest
        have ucx_perftest || echo ucx-utils
        have fi_pingpong || echo libfabric-bin
        have fio || echo fio
        [ -e /usr/include/librpma.h ] || echo librpma-dev
        have mpicc || echo libopenmpi-dev
        have mpirun || echo openmpi-bin
        have ip || echo iproute2 ;;
      pyverbs)
        /usr/bin/python3 -c 'import pyverbs' 2>/dev/null || echo python3-pyverbs
        [ -e /usr/share/doc/rdma-core/tests/run_tests.py ] || echo rdma-core ;;
      instructions)
        [ -e /usr/include/infiniband/verbs.h ] || echo libibverbs-dev
        have valgrind || echo valgrind ;;
      lab)
        have qemu-system-x86_64 || echo qemu-system-x86
        have xz || echo xz-utils
        [ -n "${RDMUX_LAB_KEYRING:-}" ] || [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || echo debian-archive-keyring ;;
      aarch64)
        have qemu-aarch64 || echo qemu-user
        have aarch64-linux-gnu-gcc || echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross ;;
      bench)
        have ucx_perftest || echo ucx-utils
        have fi_pingpong || echo libfabric-bin
        have ib_write_lat || echo perftest
        have mpicc || echo libopenmpi-dev
        have mpirun || echo openmpi-bin
        have ip || echo iproute2 ;;
      bare) have mmdebstrap || echo mmdebstrap ;;
      container) have podman || echo podman runc ;;
    esac
  done | tr ' ' '\n' | sort -u | tr '\n' ' '
}

bootstrap() {
  local packages rustup='' log as_root=()
  packages=$(bootstrap_missing "$@")
  case " $* " in *" build "*) find_rust || rustup=yes ;; esac
  [ -n "$packages$rustup" ] || return 0

  if have apt-get; then
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    if [ "$(id -u)" = 0 ] || { have sudo && { [ -t 0 ] || sudo -n true 2>/dev/null; }; }; then
      # What the package lists offer decides about Rust, so they come first.
      "${as_root[@]}" apt-get -qq update
      packages=$(bootstrap_missing "$@")
      case $packages in *rustc*) rustup='' ;; esac
      if [ -n "$packages" ]; then
        echo "installing: $packages" >&2
        log=$(mktemp)
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install $packages >"$log" 2>&1 ||
          { cat "$log" >&2; rm -f "$log"; return 1; }
        rm -f "$log"
      fi
    elif [ -n "$packages" ]; then
      echo "These packages are missing. Type this line, then start again:" >&2
      echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends $packages" >&2
      return 1
    fi
  elif [ -n "$packages" ]; then
    echo "These are missing (by their names in Debian), and this machine has no apt-get: $packages" >&2
    return 1
  fi

  if [ -n "$rustup" ]; then
    have curl || { echo "Rust $rust_wanted or newer is missing: install it from https://rustup.rs (or curl, then start again)" >&2; return 1; }
    echo "installing: Rust, by rustup, in ${CARGO_HOME:-$HOME/.cargo} and ${RUSTUP_HOME:-$HOME/.rustup}" >&2
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -q -y --no-modify-path --profile minimal -c rustfmt -c clippy >&2
  fi
  case " $* " in
    *" build "*) find_rust || { echo "no Rust $rust_wanted or newer is to be had here; install one from https://rustup.rs" >&2; return 1; } ;;
  esac
  hash -r
}
