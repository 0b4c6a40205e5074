//! Shared receive queues. A receive keeps the number that the program chose, and each completion of a queue pair that takes its receives here
//! brings one back. So there is nothing to be kept of those that a queue pair had taken when it is destroyed. Numbers that the node has a use
//! for are replaced meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdmux_rnic::{PostError, RecvRequest, SrqError, SrqInfo, Srqn};
use rdmux_verbs::CreateError;
use rdmux_verbs::provider::{self, Object};
use rdmux_verbs::sync::Mutex;
use rdmux_wire::node::control::{Kind, Message};
use rdmux_wire::node::{WorkFlags, WorkOperation};

use super::client::{Client, no_answer};
use super::device::{Device, ProtectionDomain};
use super::qp::push;
use crate::control::convert::create_error;

/// The part of a shared receive queue that its queue pairs use.
#[derive(Debug)]
pub(super) struct SrqShared {
    pub(super) id: u32,
    count: Mutex<Count>,
}

/// Receives of a queue.
#[derive(Debug)]
struct Count {
    max: u32,
    /// At least the number of those that the node has: some may be used up, and this process does not know yet.
    posted: u32,
    /// Numbers of the program's choice by those that replace them.
    replaced: BTreeMap<u64, u64>,
    /// The next number that replaces one.
    next: u64,
}

/// From here on numbers replace others, for which the node has a use: they have another bit.
const REPLACED: u64 = 1 << 62;

/// Replaced numbers that are kept beyond those of the receives that a queue holds twice: receives that queue pairs have taken and not
/// completed, among them some that never will be, because their queue pairs were destroyed.
const REPLACED_MORE: u64 = 1 << 16;

impl Count {
    /// Returns the number that the node gets for one of the program's choice.
    fn number(&mut self, wr_id: u64) -> u64 {
        if wr_id < REPLACED {
            return wr_id;
        }
        let number = self.next;
        self.next += 1;
        self.replaced.insert(number, wr_id);
        // Receives are used up in their order.
        let oldest = number.saturating_sub(2 * u64::from(self.max) + REPLACED_MORE);
        while self
            .replaced
            .first_key_value()
            .is_some_and(|(first, _)| *first < oldest)
        {
            self.replaced.pop_first();
        }
        number
    }
}

impl SrqShared {
    /// Notes that a queue pair has completed a receive of the queue. Returns its number of the program's choice.
    pub(super) fn used_up(&self, number: u64) -> u64 {
        let mut count = self.count.lock();
        count.posted = count.posted.saturating_sub(1);
        match number < REPLACED {
            true => number,
            false => count.replaced.remove(&number).unwrap_or(number),
        }
    }
}

#[derive(Debug)]
pub(super) struct SharedReceiveQueue {
    device: Device,
    srqn: Srqn,
    max_sges: usize,
    /// Held while the node changes the size, since the count is not: the thread that receives the answer may need that before.
    resizing: Mutex<()>,
    pub(super) shared: Arc<SrqShared>,
}

impl SharedReceiveQueue {
    pub(super) fn new(pd: &ProtectionDomain, max_wr: u32) -> Result<SharedReceiveQueue, CreateError> {
        let client = pd.device.client();
        let answer = client.request(&Message::CreateSrq { pd: pd.id, max_wr });
        let Message::SrqMade { id, number } = answer.map_err(|refusal| create_error(&refusal))? else {
            return Err(no_answer().into());
        };
        let srqn = Srqn(number);
        client.rings.set_srqn(id, Some(srqn));
        let count = Mutex::new(Count {
            max: max_wr,
            posted: 0,
            replaced: BTreeMap::new(),
            next: REPLACED,
        });
        Ok(SharedReceiveQueue {
            device: pd.device.clone(),
            srqn,
            max_sges: client.welcome.limits.sges as usize,
            resizing: Mutex::new(()),
            shared: Arc::new(SrqShared { id, count }),
        })
    }

    fn client(&self) -> &Client {
        self.device.client()
    }
}

impl provider::SharedReceiveQueue for SharedReceiveQueue {
    fn srqn(&self) -> Srqn {
        self.srqn
    }

    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        request.check()?;
        if request.sges.as_slice().len() > self.max_sges {
            return Err(PostError::TooManySges);
        }
        let client = self.client();
        let is_full = {
            let count = self.shared.count.lock();
            count.posted >= count.max
        };
        if is_full {
            // Queue pairs may have used up more than has completed.
            let _ = client.rings.take_now(client);
            let known = self.query().ok_or(PostError::NoSrq)?;
            let mut count = self.shared.count.lock();
            count.posted = count.posted.min(known.posted as u32);
        }
        client.rings.with_room(client, || {
            // Held until the request is in the ring, so that the node never has more than the queue holds.
            let mut count = self.shared.count.lock();
            if count.posted >= count.max {
                return Err(PostError::QueueFull);
            }
            let (operation, flags) = (WorkOperation::SharedRecv, WorkFlags::empty());
            let number = count.number(request.wr_id);
            let pushed = push(client, self.shared.id, operation, number, flags, &request.sges);
            match pushed {
                Ok(true) => count.posted += 1,
                _ => drop(count.replaced.remove(&number)),
            }
            pushed
        })?;
        client.rings.publish();
        Ok(())
    }

    fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let _resizing = self.resizing.lock();
        let before = {
            let mut count = self.shared.count.lock();
            let before = count.max;
            // Nothing is posted meanwhile that has room in one of the sizes alone.
            count.max = max_wr.map_or(before, |max_wr| max_wr.min(before));
            before
        };
        let answer = self.client().request(&Message::ModifySrq {
            srq: self.shared.id,
            max_wr,
            limit,
        });
        let now = max_wr.filter(|_| answer.is_ok());
        self.shared.count.lock().max = now.unwrap_or(before);
        answer.map_err(|refusal| SrqError::Refused(refusal.number()))?;
        Ok(())
    }

    fn query(&self) -> Option<SrqInfo> {
        let srq = self.shared.id;
        match self.client().request(&Message::QuerySrq { srq }) {
            Ok(Message::SrqInfo {
                max_wr,
                posted,
                limit,
            }) => Some(SrqInfo {
                max_wr,
                posted: posted as usize,
                limit,
            }),
            _ => None,
        }
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        let client = self.client();
        client.destroy(Kind::Srq, self.shared.id);
        client.rings.set_srqn(self.shared.id, None);
        client.forget_events(Object::Srq(self.srqn));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number__those_that_are_replaced_come_back() {
        let shared = SrqShared {
            id: 0,
            count: Mutex::new(Count {
                max: 1,
                posted: 0,
                replaced: BTreeMap::new(),
                next: REPLACED,
            }),
        };
        let number = |wr_id| shared.count.lock().number(wr_id);
        for wr_id in [0, 7, REPLACED - 1] {
            assert_eq!(number(wr_id), wr_id);
            assert_eq!(shared.used_up(wr_id), wr_id);
        }
        for wr_id in [REPLACED, 1 << 63, u64::MAX] {
            let number = number(wr_id);
            assert!((REPLACED..1 << 63).contains(&number), "{number:#x}");
            assert_eq!(shared.used_up(number), wr_id);
        }
        assert!(shared.count.lock().replaced.is_empty());
        // Those that nobody brings back are forgotten.
        for wr_id in 0..3 * REPLACED_MORE {
            number(u64::MAX - wr_id);
        }
        let kept = shared.count.lock().replaced.len() as u64;
        assert!(kept <= REPLACED_MORE + 4, "{kept}");
    }
}
