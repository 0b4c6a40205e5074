//! Passes the linker the library's name, whose number is that of its interface, and the flag that keeps the library loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,librdmux-dsm.so.0");
    // dlclose leaves it where it is: threads of a session that has not been left run its code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
