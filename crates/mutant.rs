//! The switch of deliberate defects, one at a time, with which tests prove that they can fail. Only feature `mutants` compiles them in. Crates include
//! it by `#[path]` into their own module `mutant`, beside their list of defects.

/// Evaluates to true when a defect is switched on; constant `false` without feature `mutants`.
macro_rules! mutant {
    ($name:ident) => {{
        #[cfg(feature = "mutants")]
        {
            $crate::mutant::is_on($crate::mutant::Mutant::$name)
        }
        #[cfg(not(feature = "mutants"))]
        {
            false
        }
    }};
}

/// Defines the defects of a crate, of which all have a kind, and their switch.
#[cfg(feature = "mutants")]
macro_rules! mutants {
    ($of:literal; $($(#[doc = $doc:literal])+ $name:ident,)+) => {
        #[doc = $of]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutant {
            $($(#[doc = $doc])+ $name,)+
        }

        impl Mutant {
            /// All defects.
            pub const ALL: &[Mutant] = &[$(Mutant::$name),+];
        }

        thread_local! {
            static ON: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
        }

        /// Switches one defect on for what this thread runs, or switches all off.
        pub fn set(mutant: Option<Mutant>) {
            ON.set(mutant);
        }

        pub(crate) fn is_on(mutant: Mutant) -> bool {
            ON.get() == Some(mutant)
        }
    };
}
