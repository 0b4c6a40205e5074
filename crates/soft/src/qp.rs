//! Queue pairs of a soft device.

use std::net::IpAddr;

use rdmux_rnic::{
    Bind, DirectLane, McastError, ModifyError, NotPosted, PostError, Psn, QpAttributes, QpInfo, QpInit,
    QpState, QpType, Qpn, RKey, ReceiveQueue, RecvRequest, Remains, SendFlags, SendQueue, SendRequest,
    Status,
};
use rdmux_shm::stay;
use rdmux_verbs::provider::{self, CompletionQueue as _, Object, own};
use rdmux_verbs::{AttachError, Carrier, CreateError, PostListError, QpOptions};

use super::device::{CompletionQueue, Device, ProtectionDomain};
use super::engine::{Core, InProgress};
use super::srq::XrcDomain;

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub(super) device: Device,
    pub(super) qpn: Qpn,
    pub(super) qp_type: QpType,
    /// Set when receives come from a shared receive queue.
    pub(super) has_srq: bool,
    sends: SendQueue,
    /// Where requests need no packet, they need no engine either.
    lane: Option<DirectLane>,
    receives: ReceiveQueue,
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let accesses = self.device.with(|core, now| {
            core.say_last(now, self.qpn);
            core.rnic.destroy_qp(self.qpn);
            core.async_events.forget(Object::Qp(self.qpn));
            core.leave_groups();
            core.qp_errors.remove(&self.qpn);
            core.withdraw_accesses(now, self.qpn)
        });
        self.wait_for_peers(accesses);
    }
}

impl QueuePair {
    /// Makes a queue pair in a protection domain.
    pub(super) fn new(pd: &ProtectionDomain, options: &QpOptions) -> Result<QueuePair, CreateError> {
        let cqn = |cq| own::<CompletionQueue>(cq).map(|cq| cq.cqn());
        let send_cqn = cqn(&options.send_cq).ok_or(CreateError::OtherDevice)?;
        let recv_cqn = cqn(&options.recv_cq).ok_or(CreateError::OtherDevice)?;
        let xrcd = options.xrcd.as_ref().and_then(own::<XrcDomain>);
        let init = QpInit {
            qp_type: options.qp_type,
            srq: options.srq.as_ref().map(|srq| srq.srqn()),
            xrcd: xrcd.map(XrcDomain::number),
            max_send_wr: options.max_send_wr,
            max_recv_wr: options.max_recv_wr,
            recv_cq: recv_cqn,
            ..QpInit::new(pd.pd, send_cqn)
        };
        let mut core = pd.device.lock();
        let qpn = core.rnic.create_qp(init).ok_or(CreateError::NoRoom)?;
        let sends = core.rnic.send_queue(qpn).ok_or(CreateError::NoRoom)?;
        let receives = core.rnic.receive_queue(qpn).ok_or(CreateError::NoRoom)?;
        let lane = core.rnic.direct_lane(qpn);
        drop(core);
        Ok(QueuePair {
            device: pd.device.clone(),
            qpn,
            qp_type: options.qp_type,
            has_srq: options.srq.is_some() || options.qp_type == QpType::XrcRecv,
            sends,
            lane,
            receives,
        })
    }

    /// Ends all use of the queue pair but the accesses of peers that are in progress. Returns those of the device.
    fn end(&self) -> Vec<InProgress> {
        self.device.with(|core, now| {
            core.say_last(now, self.qpn);
            core.rnic.retire_qp(now, self.qpn);
            core.qp_errors.remove(&self.qpn);
            core.withdraw_accesses(now, self.qpn)
        })
    }

    /// Waits until no peer accesses memory that was granted for the queue pair, and until the device's accesses for it have ended.
    fn wait_for_peers(&self, accesses: Vec<InProgress>) {
        let stays = self.device.lock().links.stays_of_qp(self.qpn);
        stay::wait(&stays);
        accesses.into_iter().for_each(InProgress::wait);
    }
}

impl provider::QueuePair for QueuePair {
    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn post_send(&self, request: SendRequest) -> Result<(), PostError> {
        let mut request = Some(request);
        if let Some(lane) = &self.lane
            && self.device.post_to_lane(lane, &self.sends, &mut request)
        {
            return Ok(());
        }
        match request {
            Some(request) => self.device.post_send(&self.sends, self.qpn, request),
            None => Ok(()),
        }
    }

    fn post_send_list(&self, requests: Vec<SendRequest>) -> Result<(), PostListError> {
        let requests = match <[SendRequest; 1]>::try_from(requests) {
            Ok([only]) => {
                let posted = self.post_send(only);
                return posted.map_err(|source| PostListError { index: 0, source });
            }
            Err(requests) => requests,
        };
        let lane = self.lane.as_ref();
        self.device.post_send_list(&self.sends, lane, self.qpn, requests)
    }

    fn bind_mw(&self, wr_id: u64, bind: Bind, flags: SendFlags) -> Result<RKey, PostError> {
        self.device
            .with(|core, now| core.rnic.bind_mw(now, self.qpn, wr_id, bind, flags))
    }

    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        match self.receives.post(request) {
            Ok(()) => Ok(()),
            Err(NotPosted::Refused(error)) => Err(error),
            Err(NotPosted::Undecided(request)) => {
                // In Error the receive completes at once.
                let post = |core: &mut Core, now| core.rnic.post_recv(now, self.qpn, request);
                self.device.with(post)
            }
        }
    }

    fn modify(&self, to: QpState, attributes: &QpAttributes) -> Result<(), ModifyError> {
        let stops = matches!(to, QpState::Reset | QpState::Error);
        let accesses = self.device.with(|core, now| {
            if stops {
                core.say_last(now, self.qpn);
            }
            core.rnic.modify_qp(now, self.qpn, to, attributes)?;
            if to == QpState::Rtr {
                core.meet(self.qpn);
            }
            if to == QpState::Reset {
                core.qp_errors.remove(&self.qpn);
            }
            Ok::<_, ModifyError>(match stops {
                true => core.withdraw_accesses(now, self.qpn),
                false => Vec::new(),
            })
        })?;
        if stops {
            self.wait_for_peers(accesses);
        }
        Ok(())
    }

    fn retire(&self) {
        let accesses = self.end();
        self.wait_for_peers(accesses);
    }

    fn cut_off(&self) -> bool {
        self.end().into_iter().for_each(InProgress::wait);
        !self.device.lock().links.stays_of_qp(self.qpn).is_empty()
    }

    fn query(&self) -> Option<QpInfo> {
        self.device.lock().rnic.query_qp(self.qpn)
    }

    fn carrier(&self) -> Option<Carrier> {
        let core = self.device.lock();
        let info = core.rnic.query_qp(self.qpn).filter(|info| info.path.is_some())?;
        Some(match core.links.why_not(&info) {
            None => Carrier::SharedMemory,
            Some(why) => Carrier::Udp(why.to_string()),
        })
    }

    fn error(&self) -> Option<Status> {
        self.device.lock().qp_errors.get(&self.qpn).copied()
    }

    fn keep_remains(&self) -> bool {
        self.device
            .with(|core, now| core.rnic.keep_remains(now, self.qpn))
    }

    fn take_remains(&self) -> Option<Remains> {
        self.device
            .with(|core, now| core.rnic.take_remains(now, self.qpn))
    }

    fn ready_datagram(&self, qkey: u32) -> Result<(), ModifyError> {
        self.device.with(|core, now| {
            let init = QpAttributes {
                qkey: Some(qkey),
                ..Default::default()
            };
            let rts = QpAttributes {
                sq_psn: Some(Psn::new(core.rnic.random())),
                ..Default::default()
            };
            let steps = [
                (QpState::Init, init),
                (QpState::Rtr, QpAttributes::default()),
                (QpState::Rts, rts),
            ];
            let mut modify = |(to, attr)| core.rnic.modify_qp(now, self.qpn, to, &attr);
            steps.into_iter().try_for_each(&mut modify)
        })
    }

    fn attach_mcast(&self, group: IpAddr) -> Result<(), AttachError> {
        self.device.with(|core, _| core.attach_mcast(self.qpn, group))
    }

    fn detach_mcast(&self, group: IpAddr) -> Result<(), McastError> {
        let mut core = self.device.lock();
        core.rnic.detach_mcast(self.qpn, group)?;
        core.leave_groups();
        Ok(())
    }
}
