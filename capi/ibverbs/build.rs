//! What the linker is told: the library's name, and the versions of its symbols.

use std::env;
use std::path::PathBuf;

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let map = here.join("libibverbs.map");
    println!("cargo::rerun-if-changed={}", map.display());
    println!(
        "cargo::rustc-cdylib-link-arg=-Wl,--version-script={}",
        map.display()
    );
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
}
