//! The modes of faults that a host allows.

use strum::VariantArray;

use super::FaultMode;
use crate::memory::userfault::{Abilities, Delivery, FILES_LACK, INSTALL_LACKS, Options, Writes};
use crate::memory::{Engine, Error};

impl FaultMode {
    /// Returns the means by which this mode changes pages, as far as `abilities` allow it.
    ///
    /// # Errors
    /// The part of userfaultfd(2) that the mode lacks.
    pub fn engine(self, abilities: &Abilities) -> Result<Engine, Error> {
        let delivery = match self {
            FaultMode::Thread => Delivery::Poll,
            FaultMode::Inline => Delivery::Signal,
            FaultMode::Mprotect => return Ok(Engine::Mprotect),
        };
        let catches = abilities.catches.ok_or(Error::NotPermitted)?;
        if !abilities.files {
            return Err(FILES_LACK);
        }
        if !abilities.install_for_reading {
            return Err(INSTALL_LACKS);
        }
        if delivery == Delivery::Signal && !abilities.signal {
            return Err(Error::Lacks("SIGBUS for page faults (Linux 4.14)"));
        }
        if delivery == Delivery::Poll && !abilities.poison {
            // A thread in the kernel that waits for a lost page could not be ended.
            const LACKS: &str = "poisoned pages (Linux 6.6), which mode thread needs: use mode inline";
            return Err(Error::Lacks(LACKS));
        }
        Ok(Engine::Userfault(Options {
            catches,
            delivery,
            writes: Writes::Fault,
        }))
    }

    /// Returns the mode where none is given: the first one that `abilities` allow, of [`FaultMode::Thread`], [`FaultMode::Inline`] and
    /// [`FaultMode::Mprotect`].
    pub fn best(abilities: &Abilities) -> FaultMode {
        let mut modes = FaultMode::VARIANTS.iter().copied();
        let best = modes.find(|mode| mode.engine(abilities).is_ok());
        best.unwrap_or(FaultMode::Mprotect)
    }

    /// Returns the mode of a number, which is its place among all.
    pub(crate) fn of_number(number: u64) -> Option<FaultMode> {
        FaultMode::VARIANTS.get(usize::try_from(number).ok()?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::userfault::{Catches, Route};

    const ALL: Abilities = Abilities {
        catches: Some(Catches::All),
        route: Some(Route::Call),
        files: true,
        install_for_reading: true,
        signal: true,
        poison: true,
        record: true,
    };

    #[test]
    fn best__is_the_first_that_the_host_allows() {
        let threads = Some(Catches::Threads);
        for (abilities, best) in [
            (ALL, FaultMode::Thread),
            (
                Abilities {
                    catches: threads,
                    ..ALL
                },
                FaultMode::Thread,
            ),
            (Abilities { poison: false, ..ALL }, FaultMode::Inline),
            (Abilities { signal: false, ..ALL }, FaultMode::Thread),
            (
                Abilities {
                    install_for_reading: false,
                    ..ALL
                },
                FaultMode::Mprotect,
            ),
            (Abilities { files: false, ..ALL }, FaultMode::Mprotect),
            (Abilities::default(), FaultMode::Mprotect),
        ] {
            assert_eq!(FaultMode::best(&abilities), best, "{abilities:?}");
        }
    }

    #[test]
    fn engine__says_what_a_mode_lacks() {
        let refused = |mode: FaultMode, abilities| mode.engine(&abilities).unwrap_err().to_string();
        for (mode, abilities, word) in [
            (
                FaultMode::Thread,
                Abilities::default(),
                "vm.unprivileged_userfaultfd=1",
            ),
            (FaultMode::Thread, Abilities { poison: false, ..ALL }, "Linux 6.6"),
            (FaultMode::Inline, Abilities { signal: false, ..ALL }, "SIGBUS"),
            (FaultMode::Inline, Abilities { files: false, ..ALL }, "Linux 5.19"),
        ] {
            assert!(refused(mode, abilities).contains(word), "{mode} {abilities:?}");
        }
        assert_eq!(
            FaultMode::Mprotect.engine(&Abilities::default()).unwrap(),
            Engine::Mprotect
        );
    }
}
