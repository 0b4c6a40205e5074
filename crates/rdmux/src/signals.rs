//! Signals of commands that run until they are told to end.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Starts a thread that calls `stop` on SIGINT and SIGTERM, and `reload` on each SIGHUP; without it SIGHUP ends the command as well.
pub(crate) fn handle(
    stop: impl FnOnce() + Send + 'static,
    reload: Option<impl Fn() + Send + 'static>,
) -> Result<()> {
    start(stop, reload).context("cannot install signal handlers")
}

fn start(
    stop: impl FnOnce() + Send + 'static,
    reload: Option<impl Fn() + Send + 'static>,
) -> std::io::Result<()> {
    let (mut woken, wakes) = UnixStream::pair()?;
    let [ends, reads] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let hangup = if reload.is_some() { &reads } else { &ends };
    for (signal, flag) in [(SIGINT, &ends), (SIGTERM, &ends), (SIGHUP, hangup)] {
        // The flag is set before the thread is woken: handlers run in the order of their registration.
        signal_hook::flag::register(signal, flag.clone())?;
        signal_hook::low_level::pipe::register(signal, wakes.try_clone()?)?;
    }
    let handle = move || {
        while matches!(woken.read(&mut [0; 64]), Ok(1..)) {
            if ends.load(Ordering::SeqCst) {
                return stop();
            }
            if reads.swap(false, Ordering::SeqCst)
                && let Some(reload) = &reload
            {
                reload();
            }
        }
    };
    std::thread::Builder::new()
        .name("rdmux-signals".into())
        .spawn(handle)
        .map(|_| ())
}
