//! QP states as a table. IBTA Vol 1, 10.3.1 and 11.2.4.2.

use bitflags::bitflags;
use strum::VariantArray;

use crate::qp::QpType;

/// State of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
pub enum QpState {
    /// Created, nothing set.
    Reset,
    /// Takes receives; sends and receives no packets.
    Init,
    /// Ready to receive: answers requests.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained: requests that were begun are completed, no new one is begun; then attributes may be changed.
    Sqd,
    /// Send queue error, UC and UD: sends are flushed, receives go on.
    Sqe,
    /// In error: everything posted is flushed.
    Error,
}

bitflags! {
    /// Attributes of a QP that a modify sets.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct AttrMask: u32 {
        /// Rights of peers on this QP.
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
        /// RNR timer to send.
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
        /// The Q_Key that incoming datagrams must carry.
        const QKEY = 1 << 14;
        /// Highest rate.
        const RATE_LIMIT = 1 << 15;
        /// Both ends retransmit selectively.
        const SELECTIVE = 1 << 16;
        /// Requests carry acknowledgements.
        const CARRIED_ACKS = 1 << 17;
    }
}

/// A transition: from, to, attributes that must be given, attributes that may be given.
pub(crate) type Transition = (QpState, QpState, AttrMask, AttrMask);

impl QpType {
    /// Returns the attributes that Init needs.
    fn init_needs(self) -> AttrMask {
        match self {
            QpType::Ud => AttrMask::QKEY,
            QpType::Rc | QpType::Uc | QpType::XrcSend | QpType::XrcRecv => AttrMask::ACCESS,
        }
    }

    /// Returns the attributes that ready-to-receive needs.
    fn rtr_needs(self) -> AttrMask {
        let connected = AttrMask::PATH | AttrMask::PATH_MTU | AttrMask::DEST_QPN | AttrMask::RQ_PSN;
        match self {
            QpType::Ud => AttrMask::empty(),
            QpType::Uc | QpType::XrcSend => connected,
            QpType::Rc | QpType::XrcRecv => {
                connected | AttrMask::MAX_DEST_RD_ATOMIC | AttrMask::MIN_RNR_TIMER
            }
        }
    }

    /// Returns the attributes that ready-to-send needs.
    fn rts_needs(self) -> AttrMask {
        let retries = AttrMask::TIMEOUT | AttrMask::RETRY_COUNT | AttrMask::RNR_RETRY;
        match self {
            QpType::Ud | QpType::Uc => AttrMask::SQ_PSN,
            QpType::XrcRecv => AttrMask::SQ_PSN | AttrMask::TIMEOUT,
            QpType::Rc | QpType::XrcSend => AttrMask::SQ_PSN | AttrMask::MAX_RD_ATOMIC | retries,
        }
    }

    /// Returns the attributes that both ends must have agreed on before the first packet.
    fn agreed(self) -> AttrMask {
        match self {
            QpType::Rc => AttrMask::SELECTIVE | AttrMask::CARRIED_ACKS,
            QpType::XrcSend | QpType::XrcRecv => AttrMask::SELECTIVE,
            QpType::Uc | QpType::Ud => AttrMask::empty(),
        }
    }

    /// Returns the attributes that may change while the QP works.
    fn while_working(self) -> AttrMask {
        let extensions = AttrMask::WINDOW | AttrMask::PEER_IS_RDMUX;
        let of_type = match self {
            QpType::Ud => AttrMask::QKEY,
            QpType::Uc => AttrMask::ACCESS | AttrMask::PEER_IS_RDMUX,
            QpType::XrcSend => AttrMask::ACCESS | extensions,
            QpType::Rc | QpType::XrcRecv => AttrMask::ACCESS | AttrMask::MIN_RNR_TIMER | extensions,
        };
        of_type | AttrMask::RATE_LIMIT
    }

    /// Returns the attributes that may change while the send queue is drained.
    fn while_drained(self) -> AttrMask {
        let path = match self {
            QpType::Ud => AttrMask::empty(),
            QpType::Uc | QpType::Rc | QpType::XrcSend | QpType::XrcRecv => AttrMask::PATH,
        };
        let drained = self.rts_needs().difference(AttrMask::SQ_PSN);
        let depth = self.rtr_needs() & AttrMask::MAX_DEST_RD_ATOMIC;
        self.while_working() | path | drained | depth
    }

    /// Returns every transition that is allowed; any state may also go to Reset and to Error. IBTA Vol 1, table 91 (11.2.4.2);
    /// Linux's `qp_state_table` where that says more (XRC).
    pub(crate) fn transitions(self) -> Vec<Transition> {
        use QpState::{Init, Reset, Rtr, Rts, Sqd, Sqe};
        let none = AttrMask::empty();
        let (init, working, drained) = (self.init_needs(), self.while_working(), self.while_drained());
        let mut all = vec![
            (Reset, Init, init, none),
            (Init, Init, none, init),
            (Init, Rtr, self.rtr_needs(), working | init | self.agreed()),
            (Rtr, Rts, self.rts_needs(), working),
            (Rts, Rts, none, working),
            (Rts, Sqd, none, none),
            (Sqd, Sqd, none, drained),
            (Sqd, Rts, none, working),
        ];
        if matches!(self, QpType::Uc | QpType::Ud) {
            all.push((Sqe, Rts, none, working));
        }
        all
    }
}

/// Error of a modification of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    /// No such QP.
    #[error("no such QP")]
    NoQp,
    /// The specification has no such transition.
    #[error("a QP cannot move from {from:?} to {to:?}")]
    Transition {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
    },
    /// The transition needs attributes that were not given.
    #[error("{from:?} to {to:?} needs {missing:?}")]
    Missing {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
        /// Missing attributes.
        missing: AttrMask,
    },
    /// The transition does not take attributes that were given.
    #[error("{from:?} to {to:?} does not accept {extra:?}")]
    Extra {
        /// Current state.
        from: QpState,
        /// Requested state.
        to: QpState,
        /// Attributes that the transition does not take.
        extra: AttrMask,
    },
    /// A value outside of what the specification allows.
    #[error("{0} has an invalid value")]
    Value(&'static str),
    /// The device refused it; the number is the system's errno.
    #[error("the device refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    Refused(i32),
}

/// Checks a transition against the table.
pub(crate) fn check(qp_type: QpType, from: QpState, to: QpState, given: AttrMask) -> Result<(), ModifyError> {
    let (needs, may) = if matches!(to, QpState::Reset | QpState::Error) {
        (AttrMask::empty(), AttrMask::empty())
    } else {
        let row = qp_type
            .transitions()
            .into_iter()
            .find(|t| t.0 == from && t.1 == to);
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

    /// Returns the attributes that a transition needs.
    fn needs(qp_type: QpType, from: QpState, to: QpState) -> AttrMask {
        let rows = qp_type.transitions();
        let row = rows.iter().find(|t| t.0 == from && t.1 == to);
        row.map_or(AttrMask::empty(), |t| t.2)
    }

    #[test]
    fn check__every_pair_of_states() {
        // Rows: from; columns: to, both in the order of `QpState`; u: UC and UD alone. IBTA Vol 1, figure 124 (10.3.1).
        let allowed = [
            //   Reset Init RTR RTS SQD SQE Error
            /* Reset */ "yy....y",
            /* Init  */ "yyy...y", /* RTR   */ "y..y..y", /* RTS   */ "y..yy.y",
            /* SQD   */ "y..yy.y", /* SQE   */ "y..u..y", /* Error */ "y.....y",
        ];
        for &qp_type in QpType::VARIANTS {
            for (&from, row) in QpState::VARIANTS.iter().zip(allowed) {
                for (&to, cell) in QpState::VARIANTS.iter().zip(row.chars()) {
                    let may = cell == 'y' || cell == 'u' && matches!(qp_type, QpType::Uc | QpType::Ud);
                    let got = check(qp_type, from, to, needs(qp_type, from, to));
                    assert_eq!(got.is_ok(), may, "{qp_type:?}: {from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn check__names_what_is_missing_and_what_is_extra() {
        let missing = needs(QpType::Rc, QpState::Init, QpState::Rtr).difference(AttrMask::RQ_PSN);
        assert_eq!(
            check(QpType::Rc, QpState::Init, QpState::Rtr, missing),
            Err(ModifyError::Missing {
                from: QpState::Init,
                to: QpState::Rtr,
                missing: AttrMask::RQ_PSN
            })
        );
        assert_eq!(
            check(
                QpType::Rc,
                QpState::Reset,
                QpState::Init,
                AttrMask::ACCESS | AttrMask::SQ_PSN
            ),
            Err(ModifyError::Extra {
                from: QpState::Reset,
                to: QpState::Init,
                extra: AttrMask::SQ_PSN
            })
        );
    }
}
