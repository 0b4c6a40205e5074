//! What the linker is told: the library's name, that it stays, and the versions of its symbols.

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
    // dlclose leaves it where it is: threads of a context that is still open run its code, and devices are known for the process's life.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
