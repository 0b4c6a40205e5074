//! The rdmux command.
fn main() {}
