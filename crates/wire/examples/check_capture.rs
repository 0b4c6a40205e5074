//! Checks the RoCEv2 packets of a pcap or pcapng file: `cargo run -p rdmux-wire --example check_capture -- FILE`.

use std::process::ExitCode;

use rdmux_wire::check::Checker;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: check_capture FILE");
        return ExitCode::from(2);
    };
    let mut checker = Checker::new();
    let read = std::fs::read(&path).map_err(|e| e.to_string());
    if let Err(error) = read.and_then(|bytes| checker.file(&bytes).map_err(|e| e.to_string())) {
        eprintln!("{}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    print!("{}", checker.report());
    if checker.report().passed() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
