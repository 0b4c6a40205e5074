//! Queue pairs, their requests, and address handles.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

use std::ffi::c_int;
use std::mem::{offset_of, size_of};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdmux_rnic::SgeList;
use rdmux_verbs::abi;
use rustix::io::Errno;

use super::{Cq, Elements, Mr, Mw, Pd, Srq, Xrcd, done, made};

shared! { Qp Ah }

/// Parameters of a new queue pair.
#[derive(Debug)]
pub(crate) struct QpInit {
    pub(crate) qp_type: u32,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    pub(crate) srq: Option<Arc<Srq>>,
    pub(crate) xrcd: Option<Arc<Xrcd>>,
    pub(crate) cap: abi::QpCap,
    /// Operations of [`abi::qp_ex`].
    pub(crate) extended: u64,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Qp>,
    /// The same queue pair, if it was made with extended operations.
    extended: Option<NonNull<abi::QpEx>>,
    post_send: abi::PostSend,
    post_recv: abi::PostRecv,
    /// The capacities that it has got, and the objects that it uses.
    init: QpInit,
}

/// Target or subject of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WorkTarget<'a> {
    /// Nothing but the list.
    List,
    Rdma {
        va: u64,
        rkey: u32,
    },
    Atomic {
        va: u64,
        rkey: u32,
        compare_add: u64,
        swap: u64,
    },
    Datagram {
        ah: &'a Ah,
        qpn: u32,
        qkey: u32,
    },
    Bind {
        window: &'a Mw,
        rkey: u32,
        range: BindRange<'a>,
    },
}

/// Range that a window is bound to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BindRange<'a> {
    pub(crate) region: &'a Mr,
    pub(crate) va: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
}

impl BindRange<'_> {
    fn info(&self) -> abi::MwBindInfo {
        abi::MwBindInfo {
            mr: self.region.pointer.as_ptr(),
            addr: self.va,
            length: self.length,
            mw_access_flags: self.access,
        }
    }
}

/// A send request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkRequest<'a> {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    /// In the form of the structure: immediate data in network order, or a key.
    pub(crate) imm: u32,
    pub(crate) sges: &'a SgeList,
    pub(crate) work: WorkTarget<'a>,
    /// Target of a request on XRC.
    pub(crate) srqn: u32,
}

impl WorkRequest<'_> {
    /// Returns its list; bytes inline are an element of their own.
    fn elements(&self) -> Elements {
        let mut elements = Elements::new(self.sges);
        if let Some(bytes) = self.sges.as_inline() {
            elements.list[0] = abi::Sge {
                addr: bytes.as_ptr() as u64,
                length: bytes.len() as u32,
                lkey: 0,
            };
            elements.count = 1;
        }
        elements
    }

    /// Returns the request in the library's form, with its list; the result must outlive neither.
    fn send(&self, list: &mut Elements) -> abi::SendWr {
        let is_inline = self.sges.as_inline().is_some();
        let flags = self.flags | if is_inline { abi::SEND_INLINE } else { 0 };
        // SAFETY: numbers, pointers and unions of them: zero is a value of each.
        let mut wr: abi::SendWr = unsafe { std::mem::zeroed() };
        wr.wr_id = self.wr_id;
        wr.sg_list = list.list.as_mut_ptr();
        wr.num_sge = list.count as c_int;
        (wr.opcode, wr.send_flags, wr.imm_data) = (self.opcode, flags, self.imm);
        wr.remote_srqn = self.srqn;
        match self.work {
            WorkTarget::List => {}
            WorkTarget::Rdma {
                va: remote_addr,
                rkey,
            } => wr.wr.rdma = abi::Rdma { remote_addr, rkey },
            WorkTarget::Atomic {
                va: remote_addr,
                rkey,
                compare_add,
                swap,
            } => {
                wr.wr.atomic = abi::Atomic {
                    remote_addr,
                    compare_add,
                    swap,
                    rkey,
                };
            }
            WorkTarget::Datagram {
                ah,
                qpn: remote_qpn,
                qkey: remote_qkey,
            } => {
                wr.wr.ud = abi::Ud {
                    ah: ah.pointer.as_ptr(),
                    remote_qpn,
                    remote_qkey,
                };
            }
            WorkTarget::Bind { window, rkey, range } => {
                wr.bind_mw = abi::BindMwWr {
                    mw: window.pointer.as_ptr(),
                    rkey,
                    bind_info: range.info(),
                };
            }
        }
        wr
    }
}

/// A request that only the extended interface has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExtendedRequest {
    AtomicWrite {
        va: u64,
        rkey: u32,
        bytes: [u8; 8],
    },
    Flush {
        va: u64,
        rkey: u32,
        length: u32,
        placement: u8,
        selectivity: u8,
    },
}

impl Qp {
    /// Makes a queue pair; [`Qp::cap`] has the capacities that it has got.
    pub(crate) fn new(pd: &Arc<Pd>, mut init: QpInit) -> Result<Qp, Errno> {
        let context = &pd.context;
        let ops = context.ops();
        let (post_send, post_recv) = ops.post_send.zip(ops.post_recv).ok_or(Errno::OPNOTSUPP)?;
        let srq = init.srq.as_ref().map_or(null_mut(), |srq| srq.pointer.as_ptr());
        let is_target = init.qp_type == abi::qp_type::XRC_RECV;
        let (send_cq, recv_cq) = match is_target {
            true => (null_mut(), null_mut()),
            false => (init.send_cq.pointer.as_ptr(), init.recv_cq.pointer.as_ptr()),
        };
        let pointer = if init.extended == 0 && !is_target && init.qp_type != abi::qp_type::XRC_SEND {
            let mut attr = abi::QpInitAttr {
                qp_context: null_mut(),
                send_cq,
                recv_cq,
                srq,
                cap: init.cap,
                qp_type: init.qp_type,
                sq_sig_all: 0,
            };
            // SAFETY: what it is made of lives as long as the queue pair.
            let pointer = made(unsafe { (context.library.ibv_create_qp)(pd.pointer.as_ptr(), &mut attr) })?;
            init.cap = attr.cap;
            pointer
        } else {
            let create: Option<abi::CreateQpEx> =
                context.extended(offset_of!(abi::VerbsContext, create_qp_ex));
            let create = create.ok_or(Errno::OPNOTSUPP)?;
            // SAFETY: numbers and pointers: zero is a value of each.
            let mut attr: abi::QpInitAttrEx = unsafe { std::mem::zeroed() };
            (attr.send_cq, attr.recv_cq, attr.srq) = (send_cq, recv_cq, srq);
            (attr.cap, attr.qp_type) = (init.cap, init.qp_type);
            match &init.xrcd {
                Some(xrcd) if is_target => {
                    attr.comp_mask = abi::qp_init::XRCD;
                    attr.xrcd = xrcd.pointer.as_ptr();
                }
                _ => {
                    attr.comp_mask = abi::qp_init::PD;
                    attr.pd = pd.pointer.as_ptr();
                }
            }
            if init.extended != 0 {
                attr.comp_mask |= abi::qp_init::SEND_OPS_FLAGS;
                attr.send_ops_flags = init.extended;
            }
            // SAFETY: as above.
            let pointer = made(unsafe { create(context.pointer.as_ptr(), &mut attr) })?;
            init.cap = attr.cap;
            pointer
        };
        let extended = match init.extended {
            0 => None,
            // SAFETY: the queue pair lives.
            _ => NonNull::new(unsafe { (context.library.ibv_qp_to_qp_ex)(pointer.as_ptr()) }),
        };
        Ok(Qp {
            pd: pd.clone(),
            pointer,
            extended,
            post_send,
            post_recv,
            init,
        })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives, and its number does not change.
        unsafe { (*self.pointer.as_ptr()).qp_num }
    }

    /// Returns the capacities that the device gave for those requested.
    pub(crate) fn cap(&self) -> &abi::QpCap {
        &self.init.cap
    }

    /// Returns the operations of [`abi::qp_ex`] that it takes.
    pub(crate) fn extended(&self) -> u64 {
        match self.extended {
            Some(_) => self.init.extended,
            None => 0,
        }
    }

    pub(crate) fn modify(&self, mut attr: abi::QpAttr, mask: u32) -> Result<(), Errno> {
        // SAFETY: the queue pair lives.
        done(unsafe {
            (self.pd.context.library.ibv_modify_qp)(self.pointer.as_ptr(), &mut attr, mask as c_int)
        })
    }

    /// Sets the highest rate, in 1000 bits per second.
    pub(crate) fn limit_rate(&self, rate: u32) -> Result<(), Errno> {
        let limit: Option<abi::ModifyQpRateLimit> = self
            .pd
            .context
            .extended(offset_of!(abi::VerbsContext, modify_qp_rate_limit));
        let limit = limit.ok_or(Errno::OPNOTSUPP)?;
        let mut attr = abi::QpRateLimitAttr {
            rate_limit: rate,
            ..Default::default()
        };
        // SAFETY: the queue pair lives.
        done(unsafe { limit(self.pointer.as_ptr(), &mut attr) })
    }

    pub(crate) fn query(&self, mask: u32) -> Result<abi::QpAttr, Errno> {
        let mut attr = abi::QpAttr::default();
        // SAFETY: numbers and pointers: zero is a value of each.
        let mut init: abi::QpInitAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the queue pair lives.
        let result = unsafe {
            (self.pd.context.library.ibv_query_qp)(self.pointer.as_ptr(), &mut attr, mask as c_int, &mut init)
        };
        done(result)?;
        Ok(attr)
    }

    /// Posts a request.
    pub(crate) fn post_send(&self, request: &WorkRequest<'_>) -> Result<(), Errno> {
        let mut list = request.elements();
        let mut wr = request.send(&mut list);
        let mut bad = null_mut();
        // SAFETY: the request, its list and what it points to live until the call returns, and bytes inline are copied before; the
        // device checks what else the request names by number.
        done(unsafe { (self.post_send)(self.pointer.as_ptr(), &mut wr, &mut bad) })
    }

    /// Posts requests in order by one call. An error comes with the place of its request: those before it are posted.
    pub(crate) fn post_send_chain(&self, requests: &[WorkRequest<'_>]) -> Result<(), (usize, Errno)> {
        let mut lists: Vec<Elements> = requests.iter().map(WorkRequest::elements).collect();
        let both = requests.iter().zip(&mut lists);
        let mut chain: Vec<abi::SendWr> = both.map(|(request, list)| request.send(list)).collect();
        let first = chain.as_mut_ptr();
        for at in 1..chain.len() {
            // SAFETY: both are elements of the chain, which is not touched but through this pointer from here on.
            unsafe { (*first.add(at - 1)).next = first.add(at) };
        }
        let mut bad = null_mut();
        // SAFETY: as for one request, for each of them; the last has no request behind it.
        let posted = done(unsafe { (self.post_send)(self.pointer.as_ptr(), first, &mut bad) });
        posted.map_err(|error| {
            let at = bad.addr().saturating_sub(first.addr()) / size_of::<abi::SendWr>();
            // If the library does not say which request failed, none counts as posted.
            (if at < requests.len() { at } else { 0 }, error)
        })
    }

    /// Posts a request that only the extended interface has. The caller ensures that no other request is posted meanwhile.
    pub(crate) fn post_extended(
        &self,
        wr_id: u64,
        flags: u32,
        request: ExtendedRequest,
    ) -> Result<(), Errno> {
        let pointer = self.extended.ok_or(Errno::OPNOTSUPP)?.as_ptr();
        // SAFETY: the queue pair lives, and was made with extended operations, so that it has these fields; the last, which older
        // libraries do not have, is only read where the queue pair was made for it. Nobody else uses the interface at the time.
        unsafe {
            let start = (*pointer).wr_start.ok_or(Errno::OPNOTSUPP)?;
            let complete = (*pointer).wr_complete.ok_or(Errno::OPNOTSUPP)?;
            match request {
                ExtendedRequest::AtomicWrite { va, rkey, bytes } => {
                    let write = (*pointer).wr_atomic_write.ok_or(Errno::OPNOTSUPP)?;
                    start(pointer);
                    ((*pointer).wr_id, (*pointer).wr_flags) = (wr_id, flags);
                    write(pointer, rkey, va, bytes.as_ptr().cast());
                }
                ExtendedRequest::Flush {
                    va,
                    rkey,
                    length,
                    placement,
                    selectivity,
                } => {
                    if self.init.extended & abi::qp_ex::FLUSH == 0 {
                        return Err(Errno::OPNOTSUPP);
                    }
                    let flush = (*pointer).wr_flush.ok_or(Errno::OPNOTSUPP)?;
                    start(pointer);
                    ((*pointer).wr_id, (*pointer).wr_flags) = (wr_id, flags);
                    flush(pointer, rkey, va, length as usize, placement, selectivity);
                }
            }
            done(complete(pointer))
        }
    }

    /// Binds a window of type 1; returns its new key.
    pub(crate) fn bind_mw(
        &self,
        wr_id: u64,
        flags: u32,
        window: &Mw,
        range: BindRange<'_>,
    ) -> Result<u32, Errno> {
        let bind = self.pd.context.ops().bind_mw.ok_or(Errno::OPNOTSUPP)?;
        let mut request = abi::MwBind {
            wr_id,
            send_flags: flags,
            bind_info: range.info(),
        };
        // SAFETY: queue pair, window and region live, and are of one device.
        done(unsafe { bind(self.pointer.as_ptr(), window.pointer.as_ptr(), &mut request) })?;
        Ok(window.rkey())
    }

    /// Posts a receive.
    pub(crate) fn post_recv(&self, wr_id: u64, sges: &SgeList) -> Result<(), Errno> {
        let mut list = Elements::new(sges);
        let mut wr = list.receive(wr_id);
        let mut bad = null_mut();
        // SAFETY: the request and its list live until the call returns; the device checks what they name.
        done(unsafe { (self.post_recv)(self.pointer.as_ptr(), &mut wr, &mut bad) })
    }

    pub(crate) fn attach_mcast(&self, gid: abi::Gid) -> Result<(), Errno> {
        // SAFETY: the queue pair lives, and the GID until the call returns.
        done(unsafe {
            (self.pd.context.library.ibv_attach_mcast)(self.pointer.as_ptr(), &abi::AlignedGid(gid), 0)
        })
    }

    pub(crate) fn detach_mcast(&self, gid: abi::Gid) -> Result<(), Errno> {
        // SAFETY: as above.
        done(unsafe {
            (self.pd.context.library.ibv_detach_mcast)(self.pointer.as_ptr(), &abi::AlignedGid(gid), 0)
        })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner.
        unsafe { (self.pd.context.library.ibv_destroy_qp)(self.pointer.as_ptr()) };
    }
}

/// An address handle.
#[derive(Debug)]
pub(crate) struct Ah {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Ah>,
}

impl Ah {
    pub(crate) fn new(pd: &Arc<Pd>, mut attr: abi::AhAttr) -> Result<Ah, Errno> {
        // SAFETY: the domain lives as long as the handle.
        let pointer = made(unsafe { (pd.context.library.ibv_create_ah)(pd.pointer.as_ptr(), &mut attr) })?;
        Ok(Ah {
            pd: pd.clone(),
            pointer,
        })
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner.
        unsafe { (self.pd.context.library.ibv_destroy_ah)(self.pointer.as_ptr()) };
    }
}
