//! QP states as a table. IBTA Vol 1, 10.3.1 and 11.2.4.2.

use bitflags::bitflags;

/// State of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Made, nothing set.
    Reset,
    /// Takes receives, moves no packet.
    Init,
    /// Ready to receive: answers requests.
    Rtr,
    /// Ready to send.
    Rts,
    /// In error: everything posted is flushed.
    Error,
}

bitflags! {
    /// Attributes of a QP that a modify sets.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct AttrMask: u32 {
        /// What peers may do on this QP.
        const ACCESS = 1 << 0;
        /// Addresses.
        const PATH = 1 << 1;
        /// Path MTU.
        const PATH_MTU = 1 << 2;
        /// The peer's QPN.
        const DEST_QPN = 1 << 3;
        /// First PSN to be received.
        const RQ_PSN = 1 << 4;
        /// Responder resources.
        const MAX_DEST_RD_ATOMIC = 1 << 5;
        /// RNR timer to ask for.
        const MIN_RNR_TIMER = 1 << 6;
        /// First PSN to be sent.
        const SQ_PSN = 1 << 7;
        /// Local ACK timeout.
        const TIMEOUT = 1 << 8;
        /// Retries on timeout.
        const RETRY_COUNT = 1 << 9;
        /// Retries on RNR NAK.
        const RNR_RETRY = 1 << 10;
        /// Initiator depth.
        const MAX_RD_ATOMIC = 1 << 11;
        /// Bytes in flight that the peer can take.
        const WINDOW = 1 << 12;
        /// The peer numbers the IPv4 identification of a train from 0.
        const PEER_IS_RDMUX = 1 << 13;
    }
}

/// A transition: from, to, attributes that must be given, attributes that may be given.
pub(crate) type Transition = (QpState, QpState, AttrMask, AttrMask);

const RTR_NEEDS: AttrMask = AttrMask::PATH
    .union(AttrMask::PATH_MTU)
    .union(AttrMask::DEST_QPN)
    .union(AttrMask::RQ_PSN)
    .union(AttrMask::MAX_DEST_RD_ATOMIC)
    .union(AttrMask::MIN_RNR_TIMER);
const RTS_NEEDS: AttrMask = AttrMask::SQ_PSN
    .union(AttrMask::TIMEOUT)
    .union(AttrMask::RETRY_COUNT)
    .union(AttrMask::RNR_RETRY)
    .union(AttrMask::MAX_RD_ATOMIC);
const EXTENSIONS: AttrMask = AttrMask::WINDOW.union(AttrMask::PEER_IS_RDMUX);

/// Every transition of an RC QP that is allowed; any state may also go to Reset and to Error. IBTA Vol 1, table 91
/// (11.2.4.2).
pub(crate) const TRANSITIONS: [Transition; 5] = [
    (QpState::Reset, QpState::Init, AttrMask::ACCESS, AttrMask::empty()),
    (QpState::Init, QpState::Init, AttrMask::empty(), AttrMask::ACCESS),
    (
        QpState::Init,
        QpState::Rtr,
        RTR_NEEDS,
        EXTENSIONS.union(AttrMask::ACCESS),
    ),
    (
        QpState::Rtr,
        QpState::Rts,
        RTS_NEEDS,
        EXTENSIONS.union(AttrMask::ACCESS).union(AttrMask::MIN_RNR_TIMER),
    ),
    (
        QpState::Rts,
        QpState::Rts,
        AttrMask::empty(),
        EXTENSIONS.union(AttrMask::ACCESS).union(AttrMask::MIN_RNR_TIMER),
    ),
];

/// Why a QP was not modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    /// No such QP.
    #[error("no such QP")]
    NoQp,
    /// The specification has no such transition.
    #[error("a QP does not go from {from:?} to {to:?}")]
    Transition {
        /// State it is in.
        from: QpState,
        /// State asked for.
        to: QpState,
    },
    /// The transition needs attributes that were not given.
    #[error("{from:?} to {to:?} needs {missing:?}")]
    Missing {
        /// State it is in.
        from: QpState,
        /// State asked for.
        to: QpState,
        /// What was not given.
        missing: AttrMask,
    },
    /// The transition does not take attributes that were given.
    #[error("{from:?} to {to:?} does not take {extra:?}")]
    Extra {
        /// State it is in.
        from: QpState,
        /// State asked for.
        to: QpState,
        /// What was given.
        extra: AttrMask,
    },
    /// A value outside of what the specification allows.
    #[error("{0} has a value that is not allowed")]
    Value(&'static str),
}

/// Checks a transition against the table.
pub(crate) fn check(from: QpState, to: QpState, given: AttrMask) -> Result<(), ModifyError> {
    let (needs, may) = if matches!(to, QpState::Reset | QpState::Error) {
        (AttrMask::empty(), AttrMask::empty())
    } else {
        let row = TRANSITIONS.iter().find(|t| t.0 == from && t.1 == to);
        let row = row.ok_or(ModifyError::Transition { from, to })?;
        (row.2, row.3)
    };
    let missing = needs.difference(given);
    if !missing.is_empty() {
        return Err(ModifyError::Missing { from, to, missing });
    }
    let extra = given.difference(needs | may);
    if !extra.is_empty() {
        return Err(ModifyError::Extra { from, to, extra });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [QpState; 5] = [
        QpState::Reset,
        QpState::Init,
        QpState::Rtr,
        QpState::Rts,
        QpState::Error,
    ];

    #[test]
    fn check__every_pair_of_states() {
        // Rows: from; columns: to, both in the order of STATES. IBTA Vol 1, figure 124 (10.3.1).
        let allowed = [
            [true, true, false, false, true],
            [true, true, true, false, true],
            [true, false, false, true, true],
            [true, false, false, true, true],
            [true, false, false, false, true],
        ];
        for (i, from) in STATES.into_iter().enumerate() {
            for (j, to) in STATES.into_iter().enumerate() {
                let needs = TRANSITIONS
                    .iter()
                    .find(|t| t.0 == from && t.1 == to)
                    .map_or(AttrMask::empty(), |t| t.2);
                assert_eq!(
                    check(from, to, needs).is_ok(),
                    allowed[i][j],
                    "{from:?} to {to:?}"
                );
            }
        }
    }

    #[test]
    fn check__names_what_is_missing_and_what_is_extra() {
        let missing = RTR_NEEDS.difference(AttrMask::RQ_PSN);
        assert_eq!(
            check(QpState::Init, QpState::Rtr, missing),
            Err(ModifyError::Missing {
                from: QpState::Init,
                to: QpState::Rtr,
                missing: AttrMask::RQ_PSN
            })
        );
        assert_eq!(
            check(QpState::Reset, QpState::Init, AttrMask::ACCESS | AttrMask::SQ_PSN),
            Err(ModifyError::Extra {
                from: QpState::Reset,
                to: QpState::Init,
                extra: AttrMask::SQ_PSN
            })
        );
    }
}
