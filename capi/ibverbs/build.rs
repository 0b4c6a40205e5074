//! Passes the linker the library's name, the flag that keeps the library loaded, and the versions of its symbols.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// Has the library linked by LLD: GNU ld takes no other version script beside the one that rustc gives it for what is exported. Toolchains of
/// rustup bring LLD, and only some use it by themselves; distributions have it as a package.
fn link_by_lld() {
    let rustc = env::var_os("RUSTC").expect("cargo sets it");
    let host = env::var("HOST").expect("cargo sets it");
    let sysroot = Command::new(rustc).args(["--print", "sysroot"]).output();
    let sysroot = sysroot.expect("rustc runs").stdout;
    let own = PathBuf::from(String::from_utf8_lossy(&sysroot).trim_end())
        .join("lib/rustlib")
        .join(host)
        .join("bin/gcc-ld");
    if own.join("ld.lld").exists() {
        println!("cargo::rustc-cdylib-link-arg=-B{}", own.display());
    } else if !env::split_paths(&env::var_os("PATH").unwrap_or_default())
        .any(|folder| folder.join("ld.lld").exists())
    {
        println!("cargo::error=the linker LLD is missing: install the package lld");
    }
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=lld");
}

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
    link_by_lld();
}
