//! The terminal of `rdmux top`: keys and the node's figures in, the screen out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::Frames;
use super::frame::Frame;
use super::screen::{Screen, Then};

/// Time after which a signal is noticed.
const LOOK: Duration = Duration::from_millis(200);

enum News {
    Frame(Result<Frame>),
    Key(KeyEvent),
    /// The terminal has another size.
    Size,
}

/// Shows the screen until the user quits, the node ends, or so many frames have come.
pub(super) fn run(mut frames: Frames, count: Option<u64>) -> Result<()> {
    let ends = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, ends.clone()).context("cannot install signal handlers")?;
    }
    let (sender, news) = mpsc::channel();
    let keys = sender.clone();
    // Both threads end with the process.
    std::thread::spawn(move || {
        loop {
            let frame = frames.next();
            let is_last = frame.is_err();
            if sender.send(News::Frame(frame)).is_err() || is_last {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            let news = match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => News::Key(key),
                Event::Resize(..) => News::Size,
                _ => continue,
            };
            if keys.send(news).is_err() {
                return;
            }
        }
    });
    let mut terminal = ratatui::try_init().context("the terminal")?;
    let shown = show(&mut terminal, &news, &ends, count);
    ratatui::restore();
    shown
}

fn show(
    terminal: &mut DefaultTerminal,
    news: &mpsc::Receiver<News>,
    ends: &AtomicBool,
    count: Option<u64>,
) -> Result<()> {
    let mut screen = Screen::new();
    let mut shown = 0;
    terminal.draw(|surface| screen.draw(surface))?;
    while !ends.load(Ordering::SeqCst) && count.is_none_or(|count| shown < count) {
        match news.recv_timeout(LOOK) {
            Ok(News::Frame(frame)) => {
                screen.take(frame?);
                shown += 1;
            }
            Ok(News::Key(key)) => {
                if screen.press(key) == Then::Quit {
                    return Ok(());
                }
            }
            Ok(News::Size) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => continue,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
        }
        terminal.draw(|surface| screen.draw(surface))?;
    }
    Ok(())
}
