//! XRC domains and shared receive queues.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rdmux_rnic::SgeList;
use rdmux_verbs::abi;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::{Context, Cq, Elements, Pd, done, made};

shared! { Xrcd Srq }

/// An XRC domain.
#[derive(Debug)]
pub(crate) struct Xrcd {
    context: Arc<Context>,
    pub(super) pointer: NonNull<abi::Xrcd>,
    close: abi::CloseXrcd,
}

impl Xrcd {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Xrcd, Errno> {
        let open: Option<abi::OpenXrcd> = context.extended(offset_of!(abi::VerbsContext, open_xrcd));
        let close = context.extended(offset_of!(abi::VerbsContext, close_xrcd));
        let (open, close) = open.zip(close).ok_or(Errno::OPNOTSUPP)?;
        let mut attr = abi::XrcdInitAttr {
            comp_mask: abi::xrcd::FD | abi::xrcd::OFLAGS,
            fd: -1,
            oflags: OFlags::CREATE.bits() as c_int,
        };
        // SAFETY: the context is open, and held.
        let pointer = made(unsafe { open(context.pointer.as_ptr(), &mut attr) })?;
        Ok(Xrcd {
            context: context.clone(),
            pointer,
            close,
        })
    }
}

impl Drop for Xrcd {
    fn drop(&mut self) {
        // SAFETY: what uses it holds it, so that nothing is left; it holds its context.
        unsafe { (self.close)(self.pointer.as_ptr()) };
        let _ = &self.context;
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pd: Arc<Pd>,
    pub(super) pointer: NonNull<abi::Srq>,
    post: abi::PostSrqRecv,
    number: u32,
    max_sge: u32,
    /// The objects that a queue of XRC uses.
    _xrc: Option<(Arc<Xrcd>, Arc<Cq>)>,
}

impl Srq {
    /// Makes a queue for `max_wr` receives of `max_sge` elements. Its events carry `number`, unless peers name it.
    pub(crate) fn new(
        pd: &Arc<Pd>,
        max_wr: u32,
        max_sge: u32,
        number: u32,
        xrc: Option<(Arc<Xrcd>, Arc<Cq>)>,
    ) -> Result<Srq, Errno> {
        let context = &pd.context;
        let post = context.ops().post_srq_recv.ok_or(Errno::OPNOTSUPP)?;
        let srq_context = std::ptr::without_provenance_mut(number as usize);
        let attr = abi::SrqAttr {
            max_wr,
            max_sge,
            srq_limit: 0,
        };
        let Some((xrcd, cq)) = &xrc else {
            let mut init = abi::SrqInitAttr { srq_context, attr };
            // SAFETY: the domain lives as long as the queue.
            let pointer = made(unsafe { (context.library.ibv_create_srq)(pd.pointer.as_ptr(), &mut init) })?;
            return Ok(Srq {
                pd: pd.clone(),
                pointer,
                post,
                number,
                max_sge: init.attr.max_sge.max(1),
                _xrc: None,
            });
        };
        let create: Option<abi::CreateSrqEx> = context.extended(offset_of!(abi::VerbsContext, create_srq_ex));
        let number_of: Option<abi::GetSrqNum> = context.extended(offset_of!(abi::VerbsContext, get_srq_num));
        let (create, number_of) = create.zip(number_of).ok_or(Errno::OPNOTSUPP)?;
        let mut init = abi::SrqInitAttrEx {
            srq_context,
            attr,
            comp_mask: abi::srq::INIT_TYPE | abi::srq::INIT_PD | abi::srq::INIT_XRCD | abi::srq::INIT_CQ,
            srq_type: abi::srq::TYPE_XRC,
            pd: pd.pointer.as_ptr(),
            xrcd: xrcd.pointer.as_ptr(),
            cq: cq.pointer.as_ptr(),
            max_num_tags: 0,
            max_ops: 0,
        };
        // SAFETY: what it is made of lives as long as the queue.
        let pointer = made(unsafe { create(context.pointer.as_ptr(), &mut init) })?;
        let mut srq = Srq {
            pd: pd.clone(),
            pointer,
            post,
            number,
            max_sge: init.attr.max_sge.max(1),
            _xrc: xrc.clone(),
        };
        // SAFETY: the queue lives.
        done(unsafe { number_of(srq.pointer.as_ptr(), &mut srq.number) })?;
        // SAFETY: nobody but this thread has the queue yet. Its events carry the number by which peers name it.
        unsafe {
            (*srq.pointer.as_ptr()).srq_context = std::ptr::without_provenance_mut(srq.number as usize)
        };
        Ok(srq)
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Returns how many elements a receive may have.
    pub(crate) fn max_sge(&self) -> usize {
        self.max_sge as usize
    }

    /// Posts a receive.
    pub(crate) fn post_recv(&self, wr_id: u64, sges: &SgeList) -> Result<(), Errno> {
        let mut list = Elements::new(sges);
        let mut wr = list.receive(wr_id);
        let mut bad = null_mut();
        // SAFETY: the request and its list live until the call returns; the device checks what they name.
        done(unsafe { (self.post)(self.pointer.as_ptr(), &mut wr, &mut bad) })
    }

    pub(crate) fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Errno> {
        let mut attr = abi::SrqAttr {
            max_wr: max_wr.unwrap_or(0),
            max_sge: 0,
            srq_limit: limit.unwrap_or(0),
        };
        let mask = if max_wr.is_some() { abi::srq::MAX_WR } else { 0 }
            | if limit.is_some() { abi::srq::LIMIT } else { 0 };
        // SAFETY: the queue lives.
        done(unsafe { (self.pd.context.library.ibv_modify_srq)(self.pointer.as_ptr(), &mut attr, mask) })
    }

    pub(crate) fn query(&self) -> Result<abi::SrqAttr, Errno> {
        let mut attr = abi::SrqAttr::default();
        // SAFETY: the queue lives.
        done(unsafe { (self.pd.context.library.ibv_query_srq)(self.pointer.as_ptr(), &mut attr) })?;
        Ok(attr)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it, so that none is left.
        unsafe { (self.pd.context.library.ibv_destroy_srq)(self.pointer.as_ptr()) };
    }
}
