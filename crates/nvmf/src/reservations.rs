//! Reservations in files, so that they outlast the target and a loss of power.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rdmux_wire::nvme::ReservationType;

use crate::identity;
use crate::target::{ReservationState, ReservationStore};

/// First line of a file.
const HEADER: &str = "rdmux reservations 1";
/// Bytes of a file that is read: there are 1,024 registrants at most.
const BYTES_MAX: u64 = 1 << 20;

/// A folder with a file for each namespace whose reservations are kept.
///
/// A file is text: the header, `generation N`, `holder HOST TYPE` if there is a reservation, `registrant HOST KEY` for each, `end`. Hosts and keys are
/// hexadecimal.
#[derive(Clone, Debug)]
pub struct ReservationFolder(PathBuf);

impl ReservationFolder {
    /// Keeps reservations in a folder, which is made when the first host asks for that.
    pub fn new(folder: impl Into<PathBuf>) -> ReservationFolder {
        ReservationFolder(folder.into())
    }

    fn path(&self, namespace: &[u8; 16]) -> PathBuf {
        self.0.join(identity::uuid_text(namespace))
    }
}

impl ReservationStore for ReservationFolder {
    fn load(&self, namespace: &[u8; 16]) -> io::Result<Option<ReservationState>> {
        let path = self.path(namespace);
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        match fs::metadata(&path) {
            Ok(found) if found.len() > BYTES_MAX => return Err(named(damaged())),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(named(error)),
        }
        let text = fs::read_to_string(&path).map_err(named)?;
        parse(&text).map(Some).ok_or_else(|| named(damaged()))
    }

    fn save(&self, namespace: &[u8; 16], state: Option<&ReservationState>) -> io::Result<()> {
        let path = self.path(namespace);
        let Some(state) = state else {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
                Ok(()) => sync_folder(&self.0),
            };
        };
        fs::create_dir_all(&self.0)?;
        // Whoever reads the file finds the old state or the new one.
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(emit(state).as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        sync_folder(&self.0)
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn damaged() -> io::Error {
    let text = "not a file of reservations: remove it if no host relies on what it keeps";
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn emit(state: &ReservationState) -> String {
    let mut text = format!("{HEADER}\ngeneration {}\n", state.generation);
    let host = |host: &[u8; 16]| format!("{:032x}", u128::from_be_bytes(*host));
    if let Some((holder, kind)) = &state.holder {
        let _ = writeln!(text, "holder {} {}", host(holder), *kind as u8);
    }
    for (registrant, key) in &state.registrants {
        let _ = writeln!(text, "registrant {} {key:016x}", host(registrant));
    }
    text + "end\n"
}

fn parse(text: &str) -> Option<ReservationState> {
    let mut state = ReservationState::default();
    let mut lines = text.lines();
    if lines.next() != Some(HEADER) {
        return None;
    }
    let host = |text: &str| u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes);
    loop {
        let words: Vec<_> = lines.next()?.split(' ').collect();
        match words[..] {
            ["generation", number] => state.generation = number.parse().ok()?,
            ["holder", holder, kind] => {
                let kind = ReservationType::new(kind.parse().ok()?)?;
                state.holder = Some((host(holder)?, kind));
            }
            ["registrant", registrant, key] => {
                let key = u64::from_str_radix(key, 16).ok()?;
                state.registrants.insert(host(registrant)?, key);
            }
            // A file that was cut does not end so.
            ["end"] => return Some(state),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> ReservationState {
        ReservationState {
            generation: 9,
            registrants: [([1; 16], 7), ([0xfe; 16], u64::MAX)].into(),
            holder: Some(([1; 16], ReservationType::ExclusiveAccessRegistrants)),
        }
    }

    #[test]
    fn folder__returns_what_was_kept_last() {
        let folder = tempfile::tempdir().unwrap();
        let store = ReservationFolder::new(folder.path().join("made"));
        assert_eq!(store.load(&[1; 16]).unwrap(), None);
        store.save(&[1; 16], None).unwrap();
        for state in [state(), ReservationState::default()] {
            store.save(&[1; 16], Some(&state)).unwrap();
            assert_eq!(store.load(&[1; 16]).unwrap(), Some(state));
        }
        assert_eq!(store.load(&[2; 16]).unwrap(), None, "another namespace");
        store.save(&[1; 16], None).unwrap();
        assert_eq!(store.load(&[1; 16]).unwrap(), None);
    }

    #[test]
    fn folder__refuses_a_file_that_was_cut() {
        let folder = tempfile::tempdir().unwrap();
        let store = ReservationFolder::new(folder.path());
        let whole = emit(&state());
        for len in 0..whole.len() - 1 {
            fs::write(store.path(&[1; 16]), &whole[..len]).unwrap();
            let error = store.load(&[1; 16]).unwrap_err().to_string();
            assert!(
                error.contains("01010101-") && error.contains("remove it"),
                "{error}"
            );
        }
    }
}
