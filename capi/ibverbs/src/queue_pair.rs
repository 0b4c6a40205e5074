//! Queue pairs and their work requests.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::slice;
use std::sync::Arc;

use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{
    Access, Bind, INLINE_BYTES_MAX, LKey, ModifyError, Operation, Path, PathMtu, PostError, Psn,
    QpAttributes, QpOptions, QpState, QpType, Qpn, QueuePair, RKey, RecvRequest, SGE_MAX, SendFlags,
    SendRequest, Sge, SgeList, Srqn, Target,
};

use crate::address::{AhObject, vector};
use crate::channel::{CqObject, errno_of};
use crate::context::ContextObject;
use crate::events::Given;
use crate::memory::PdObject;
use crate::uses::Use;
use crate::wr::{self, Builder};
use crate::{abi, made, memory, srq, status, xrc};

/// Maximum number of requests in a queue of a queue pair.
pub(crate) const WR_MAX: u32 = 1 << 14;

/// Object behind a program's `struct ibv_qp` pointer.
#[repr(C)]
pub(crate) struct QpObject {
    shown: UnsafeCell<abi::QpEx>,
    pub(crate) pair: QueuePair,
    /// `sq_sig_all`: set when each request is signalled.
    pub(crate) signal_all: bool,
    pub(crate) cap: abi::QpCap,
    /// Requests being built between start and complete, for a queue pair made for them.
    pub(crate) builder: Builder,
    pub(crate) given: Given,
    /// Attributes that the program has set, for its queries.
    attributes: Mutex<abi::QpAttr>,
    address: IpAddr,
    /// Domain of an XRC target.
    xrc: Option<Arc<xrc::XrcdShared>>,
    /// One reference for each handle that a program has: an XRC target may be opened again.
    opened: Arc<()>,
    /// Its domain and its queues.
    _of: Vec<Use>,
}

impl QpObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that `ibv_create_qp` gave out, and is not destroyed.
    pub(crate) unsafe fn of<'a>(pair: *mut abi::Qp) -> &'a QpObject {
        // SAFETY: as the caller says.
        unsafe { &*pair.cast::<QpObject>() }
    }
}

/// Object that a queue pair is made in: a protection domain, or for an XRC target its domain.
#[derive(Clone, Copy)]
pub(crate) enum Owner {
    Domain(*mut abi::Pd),
    Xrc(*mut abi::Xrcd),
}

/// Makes a queue pair; `operations` are those that it must have functions for, if any.
///
/// # Safety
/// The objects that `owner` and `init` name were made, and are not destroyed.
pub(crate) unsafe fn create(
    owner: Owner,
    init: &mut abi::QpInitAttr,
    operations: Option<u64>,
) -> Result<*mut abi::Qp, c_int> {
    let qp_type = match (init.qp_type, owner) {
        (abi::qp_type::RC, Owner::Domain(_)) => QpType::Rc,
        (abi::qp_type::UC, Owner::Domain(_)) => QpType::Uc,
        (abi::qp_type::UD, Owner::Domain(_)) => QpType::Ud,
        (abi::qp_type::XRC_SEND, Owner::Domain(_)) => QpType::XrcSend,
        (abi::qp_type::XRC_RECV, Owner::Xrc(_)) => QpType::XrcRecv,
        (abi::qp_type::XRC_RECV, _) => return Err(libc::EINVAL),
        _ => return Err(libc::EOPNOTSUPP),
    };
    let cap = &mut init.cap;
    match qp_type {
        QpType::XrcSend => (cap.max_recv_wr, cap.max_recv_sge) = (0, 0),
        QpType::XrcRecv => *cap = abi::QpCap::default(),
        _ => {}
    }
    let fits = cap.max_send_wr <= WR_MAX
        && cap.max_recv_wr <= WR_MAX
        && cap.max_send_sge <= SGE_MAX as u32
        && cap.max_recv_sge <= SGE_MAX as u32
        && cap.max_inline_data <= INLINE_BYTES_MAX as u32;
    let sends = qp_type != QpType::XrcRecv;
    let receives = sends && qp_type != QpType::XrcSend;
    if !fits || (sends && init.send_cq.is_null()) || (receives && init.recv_cq.is_null()) {
        return Err(libc::EINVAL);
    }
    if operations.is_some_and(|wanted| wanted & !wr::OFFERED != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    let (mut pd, mut srq, mut xrc) = (std::ptr::null_mut(), None, None);
    let mut used = Vec::new();
    let (context, domain, send_cq, recv_cq);
    match owner {
        Owner::Domain(of) => {
            pd = of;
            cap.max_send_sge = cap.max_send_sge.max(1);
            let recv = if receives {
                cap.max_recv_sge = cap.max_recv_sge.max(1);
                init.recv_cq
            } else {
                init.send_cq
            };
            // SAFETY: a domain and queues that were made, says the caller.
            let (own, queues) = unsafe {
                context = (*of).context;
                (PdObject::of(of), [CqObject::of(init.send_cq), CqObject::of(recv)])
            };
            used.push(own.uses.begin());
            used.extend(queues.map(|queue| queue.uses.begin()));
            domain = own.domain.clone();
            [send_cq, recv_cq] = queues.map(|queue| queue.queue.clone());
            if receives && !init.srq.is_null() {
                // SAFETY: a queue that was made, says the caller.
                let queue = unsafe { srq::SrqObject::of(init.srq) };
                used.push(queue.uses.begin());
                srq = Some(queue.queue.clone());
            }
        }
        Owner::Xrc(of) => {
            // SAFETY: a domain that was made, says the caller.
            let shared = unsafe {
                context = (*of).context;
                &xrc::XrcdObject::of(of).shared
            };
            (domain, send_cq, recv_cq) = (shared.pd.clone(), shared.cq.clone(), shared.cq.clone());
            xrc = Some(shared.clone());
            init.send_cq = std::ptr::null_mut();
            (init.recv_cq, init.srq) = (std::ptr::null_mut(), std::ptr::null_mut());
        }
    }
    let options = QpOptions {
        qp_type,
        recv_cq,
        max_send_wr: init.cap.max_send_wr.max(1),
        max_recv_wr: init.cap.max_recv_wr.max(1),
        srq,
        xrcd: xrc.as_ref().map(|shared| shared.domain.clone()),
        ..QpOptions::new(&send_cq)
    };
    let pair = domain.create_qp(&options).map_err(|error| errno_of(&error))?;
    // SAFETY: the context of a domain that was made, says the caller.
    Ok(unsafe { show((pair, Arc::default()), context, pd, init, operations, (xrc, used)) })
}

/// Makes the object that a program gets for a queue pair.
///
/// # Safety
/// The context is open.
unsafe fn show(
    (pair, opened): (QueuePair, Arc<()>),
    context: *mut abi::Context,
    pd: *mut abi::Pd,
    init: &abi::QpInitAttr,
    operations: Option<u64>,
    (xrc, used): (Option<Arc<xrc::XrcdShared>>, Vec<Use>),
) -> *mut abi::Qp {
    // SAFETY: all of it may be zero: numbers, null pointers, and functions that are none.
    let mut shown: abi::QpEx = unsafe { std::mem::zeroed() };
    let number = pair.qpn().value();
    let qp = &mut shown.qp;
    (qp.context, qp.qp_context) = (context, init.qp_context);
    (qp.pd, qp.send_cq, qp.recv_cq, qp.srq) = (pd, init.send_cq, init.recv_cq, init.srq);
    (qp.handle, qp.qp_num, qp.qp_type) = (number, number, init.qp_type);
    if operations.is_some() {
        wr::give(&mut shown);
    }
    // SAFETY: as the caller says; it lives as long as its objects.
    let context = unsafe { ContextObject::of(context) };
    let made = QpObject {
        shown: UnsafeCell::new(shown),
        pair,
        signal_all: init.sq_sig_all != 0,
        cap: init.cap,
        builder: Builder::default(),
        given: Given::default(),
        attributes: Mutex::default(),
        address: context.of.address,
        xrc,
        opened,
        _of: used,
    };
    let made: *mut abi::Qp = Box::into_raw(Box::new(made)).cast();
    // Events of a queue pair that is opened again go to the handle that made it.
    context.objects().pairs.entry(number).or_insert(made);
    made
}

/// `ibv_open_qp`: opens the XRC target that has the number.
///
/// # Safety
/// The context is open, the domain was made and is not closed.
pub(crate) unsafe fn open(
    context: *mut abi::Context,
    attr: &abi::QpOpenAttr,
    qp_context: *mut c_void,
) -> Result<*mut abi::Qp, c_int> {
    // SAFETY: as the caller says.
    let (own, wanted) = unsafe { (ContextObject::of(context), &xrc::XrcdObject::of(attr.xrcd).shared) };
    let found = {
        let objects = own.objects();
        objects.pairs.get(&attr.qp_num).and_then(|known| {
            // SAFETY: it is there while it is among the objects, which are held.
            let known = unsafe { QpObject::of(*known) };
            let same = known.xrc.as_ref().is_some_and(|of| Arc::ptr_eq(of, wanted));
            same.then(|| (known.pair.clone(), known.opened.clone()))
        })
    };
    let is_target = attr.qp_type == abi::qp_type::XRC_RECV;
    let pair = found.filter(|_| is_target).ok_or(libc::EINVAL)?;
    // SAFETY: all of it may be zero: numbers and null pointers.
    let mut init: abi::QpInitAttr = unsafe { std::mem::zeroed() };
    (init.qp_context, init.qp_type) = (qp_context, attr.qp_type);
    // SAFETY: as the caller says.
    Ok(unsafe {
        show(
            pair,
            context,
            std::ptr::null_mut(),
            &init,
            None,
            (Some(wanted.clone()), Vec::new()),
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: *mut abi::Pd, init: *mut abi::QpInitAttr) -> *mut abi::Qp {
    // SAFETY: as the caller says.
    made(unsafe { create(Owner::Domain(pd), &mut *init, None) })
}

/// Returns the attributes that the older structure has.
pub(crate) fn basic(init: &abi::QpInitAttrEx) -> abi::QpInitAttr {
    abi::QpInitAttr {
        qp_context: init.qp_context,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        cap: init.cap,
        qp_type: init.qp_type,
        sq_sig_all: init.sq_sig_all,
    }
}

unsafe fn create_extended(init: &mut abi::QpInitAttrEx) -> Result<*mut abi::Qp, c_int> {
    use abi::qp_init::{CREATE_FLAGS, PD, SEND_OPS_FLAGS, XRCD};
    // None of the flags is supported, but it is no error to set none.
    let flags = if init.comp_mask & CREATE_FLAGS != 0 {
        init.create_flags
    } else {
        0
    };
    if init.comp_mask & !(PD | XRCD | SEND_OPS_FLAGS | CREATE_FLAGS) != 0 || flags != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let owner = match init.qp_type {
        abi::qp_type::XRC_RECV if init.comp_mask & XRCD != 0 => Owner::Xrc(init.xrcd),
        abi::qp_type::XRC_RECV => return Err(libc::EINVAL),
        _ if init.comp_mask & PD != 0 => Owner::Domain(init.pd),
        _ => return Err(libc::EINVAL),
    };
    let operations = (init.comp_mask & SEND_OPS_FLAGS != 0).then_some(init.send_ops_flags);
    let mut basic = basic(init);
    // SAFETY: as the caller says.
    let made = unsafe { create(owner, &mut basic, operations) }?;
    init.cap = basic.cap;
    Ok(made)
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    _: *mut abi::Context,
    init: *mut abi::QpInitAttrEx,
) -> *mut abi::Qp {
    // SAFETY: as the caller says.
    made(unsafe { create_extended(&mut *init) })
}

/// Returns the same queue pair, if it was made with functions for its requests.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_to_qp_ex(pair: *mut abi::Qp) -> *mut abi::QpEx {
    // SAFETY: a queue pair that was made, says the caller.
    let has_functions = unsafe { (*pair.cast::<abi::QpEx>()).wr_start }.is_some();
    if has_functions {
        pair.cast()
    } else {
        std::ptr::null_mut()
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_qp(pair: *mut abi::Qp) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*pair).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a queue pair that was made, says the caller.
    let (context, own) = unsafe { ((*pair).context, QpObject::of(pair)) };
    // SAFETY: an open context, which lives as long as its objects.
    unsafe { ContextObject::of(context) }.take_out(pair.cast(), |objects| {
        let number = own.pair.qpn().value();
        if objects.pairs.get(&number) == Some(&pair) {
            objects.pairs.remove(&number);
        }
    });
    own.given.wait_acknowledged();
    // SAFETY: as the caller says, and nobody finds it any more.
    unsafe { end(pair) };
    0
}

/// Ends a queue pair: connections may still have it, but peers reach nothing by it, and nothing of it completes.
///
/// # Safety
/// It was made, has left the objects, and is not used any more.
pub(crate) unsafe fn end(pair: *mut abi::Qp) {
    // SAFETY: made by a Box in `show`; the rest as the caller says.
    let QpObject {
        pair, opened, _of, ..
    } = *unsafe { Box::from_raw(pair.cast::<QpObject>()) };
    if Arc::into_inner(opened).is_some() {
        pair.retire();
    }
}

/// The states in the order of `enum ibv_qp_state`.
const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Error,
];

pub(crate) fn number_of(state: QpState) -> u32 {
    STATES.iter().position(|known| *known == state).unwrap_or(0) as u32
}

/// Refuses attributes that the code below cannot express: one port, one P_Key, no second path, queues that keep their length.
fn check(attr: &abi::QpAttr, mask: u32, before: u32) -> Result<(), c_int> {
    use abi::qp_attr::*;
    let has = |bit: u32| mask & bit != 0;
    // IBV_QPS_RESET, IBV_QPS_INIT
    let begins = has(STATE) && (before, attr.qp_state) == (0, 1);
    let invalid = has(UNKNOWN)
        || has(PORT) && attr.port_num != 1
        || has(PKEY_INDEX) && attr.pkey_index != 0
        || begins && mask & (PORT | PKEY_INDEX) != PORT | PKEY_INDEX
        || has(CUR_STATE) && before != attr.cur_qp_state;
    if invalid {
        return Err(libc::EINVAL);
    }
    // IBV_MIG_MIGRATED is the only state.
    if has(ALT_PATH | CAP) || has(PATH_MIG_STATE) && attr.path_mig_state != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    Ok(())
}

/// `ibv_modify_qp_rate_limit(3)`: supports the rate alone.
pub(crate) unsafe extern "C" fn modify_qp_rate_limit(
    pair: *mut abi::Qp,
    attr: *mut abi::QpRateLimitAttr,
) -> c_int {
    // SAFETY: a queue pair that was made, and a structure of the caller's.
    let (own, limit) = unsafe { (QpObject::of(pair), &*attr) };
    if limit.comp_mask != 0 {
        return libc::EINVAL;
    }
    // The device determines the length of a burst.
    if limit.max_burst_sz != 0 || limit.typical_pkt_sz != 0 {
        return libc::EOPNOTSUPP;
    }
    let attr = abi::QpAttr {
        rate_limit: limit.rate_limit,
        ..abi::QpAttr::default()
    };
    status(modify(own, &attr, abi::qp_attr::RATE_LIMIT))
}

fn modify(own: &QpObject, attr: &abi::QpAttr, mask: u32) -> Result<(), c_int> {
    let mut kept = own.attributes.lock();
    use abi::qp_attr::*;
    // Programs set the attributes of both halves at both ends of XRC, and the kernel's interface ignores those that an end does
    // not have.
    let mask = match own.pair.qp_type() {
        QpType::XrcSend => mask & !(MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER),
        QpType::XrcRecv => mask & !(MAX_QP_RD_ATOMIC | RETRY_CNT | RNR_RETRY),
        _ => mask,
    };
    let has = |bit: u32| mask & bit != 0;
    // The state may have changed by itself since it was last set.
    let before = own
        .pair
        .query()
        .map_or(kept.qp_state, |info| number_of(info.state));
    check(attr, mask, before)?;
    let to = if has(STATE) { attr.qp_state } else { before };
    let state = *STATES.get(to as usize).ok_or(libc::EINVAL)?;
    let dest = if has(DEST_QPN) {
        attr.dest_qp_num
    } else {
        kept.dest_qp_num
    };
    let path = if has(AV) && own.pair.qp_type() != QpType::Ud {
        let (dst, traffic_class) = vector(&attr.ah_attr)?;
        let device = own.pair.pd().device();
        Some(Path {
            src: own.address,
            dst,
            src_port: device
                .source_port(Qpn::new(dest))
                .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?,
            traffic_class,
        })
    } else {
        None
    };
    let path_mtu = match attr.path_mtu {
        _ if !has(PATH_MTU) => None,
        code => Some(
            u8::try_from(code)
                .ok()
                .and_then(PathMtu::from_code)
                .ok_or(libc::EINVAL)?
                .bytes(),
        ),
    };
    let attributes = QpAttributes {
        access: has(ACCESS_FLAGS).then(|| Access::from_bits_truncate(attr.qp_access_flags)),
        path,
        path_mtu,
        dest_qpn: has(DEST_QPN).then(|| Qpn::new(attr.dest_qp_num)),
        rq_psn: has(RQ_PSN).then(|| Psn::new(attr.rq_psn)),
        sq_psn: has(SQ_PSN).then(|| Psn::new(attr.sq_psn)),
        max_dest_rd_atomic: has(MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic),
        max_rd_atomic: has(MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic),
        min_rnr_timer: has(MIN_RNR_TIMER).then_some(attr.min_rnr_timer),
        timeout: has(TIMEOUT).then_some(attr.timeout),
        retry_count: has(RETRY_CNT).then_some(attr.retry_cnt),
        rnr_retry: has(RNR_RETRY).then_some(attr.rnr_retry),
        qkey: has(QKEY).then_some(attr.qkey),
        rate_limit_bps: has(RATE_LIMIT).then(|| u64::from(attr.rate_limit) * 1000),
        ..QpAttributes::default()
    };
    own.pair.modify(state, &attributes).map_err(|error| match error {
        ModifyError::NoQp => libc::ENOENT,
        _ => libc::EINVAL,
    })?;
    // SAFETY: the program's own structure, which it may read at any time.
    unsafe { (&raw mut (*own.shown.get()).qp.state).write(to) };
    keep(&mut kept, attr, mask);
    kept.qp_state = to;
    Ok(())
}

/// Keeps the attributes that were set: a program may query them.
fn keep(kept: &mut abi::QpAttr, attr: &abi::QpAttr, mask: u32) {
    use abi::qp_attr::*;
    macro_rules! fields {
        ($($bit:ident => $($field:ident),*;)*) => {
            $(if mask & $bit != 0 { $(kept.$field = attr.$field;)* })*
        };
    }
    fields! {
        ACCESS_FLAGS => qp_access_flags;
        PKEY_INDEX => pkey_index;
        PORT => port_num;
        QKEY => qkey;
        AV => ah_attr;
        PATH_MTU => path_mtu;
        TIMEOUT => timeout;
        RETRY_CNT => retry_cnt;
        RATE_LIMIT => rate_limit;
        RNR_RETRY => rnr_retry;
        RQ_PSN => rq_psn;
        MAX_QP_RD_ATOMIC => max_rd_atomic;
        MIN_RNR_TIMER => min_rnr_timer;
        SQ_PSN => sq_psn;
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        DEST_QPN => dest_qp_num;
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    pair: *mut abi::Qp,
    attr: *mut abi::QpAttr,
    mask: c_int,
) -> c_int {
    // SAFETY: a queue pair that was made, and a structure of the caller's.
    status(unsafe { modify(QpObject::of(pair), &*attr, mask.cast_unsigned()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    pair: *mut abi::Qp,
    attr: *mut abi::QpAttr,
    _: c_int,
    init: *mut abi::QpInitAttr,
) -> c_int {
    // SAFETY: a queue pair that was made, says the caller.
    let own = unsafe { QpObject::of(pair) };
    let Some(info) = own.pair.query() else {
        return libc::EINVAL;
    };
    let state = number_of(info.state);
    let mut kept = own.attributes.lock();
    kept.qp_state = state;
    // SAFETY: the program's own structure, of which nothing but the state is ever written.
    let qp = unsafe {
        (*pair).state = state;
        &*pair
    };
    let shown = abi::QpAttr {
        qp_state: state,
        cur_qp_state: state,
        cap: own.cap,
        port_num: 1,
        ..*kept
    };
    let made_with = abi::QpInitAttr {
        qp_context: qp.qp_context,
        send_cq: qp.send_cq,
        recv_cq: qp.recv_cq,
        srq: qp.srq,
        cap: own.cap,
        qp_type: qp.qp_type,
        sq_sig_all: own.signal_all.into(),
    };
    // SAFETY: places of the caller's.
    unsafe {
        *attr = shown;
        *init = made_with;
    }
    0
}

/// Returns the elements of a request.
///
/// # Safety
/// `count` elements are there, unless it is 0.
pub(crate) unsafe fn elements<'a>(list: *const abi::Sge, count: c_int) -> Result<&'a [abi::Sge], c_int> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    match count {
        0 => Ok(&[]),
        1..=SGE_MAX => {
            // SAFETY: as the caller says.
            Ok(unsafe { slice::from_raw_parts(list, count) })
        }
        _ => Err(libc::EINVAL),
    }
}

pub(crate) fn sges(list: &[abi::Sge]) -> SgeList {
    let sge = |sge: &abi::Sge| Sge::new(sge.addr, sge.length, LKey(sge.lkey));
    match list {
        [only] => sge(only).into(),
        _ => SgeList::from(&list.iter().map(sge).collect::<Vec<_>>()[..]),
    }
}

/// Copies the bytes to be sent inline.
///
/// # Safety
/// The elements name memory of the program that lives.
unsafe fn inline(list: &[abi::Sge]) -> Result<SgeList, c_int> {
    let mut bytes = Vec::new();
    for sge in list {
        if bytes.len() + sge.length as usize > INLINE_BYTES_MAX {
            return Err(libc::EINVAL);
        }
        if sge.length > 0 {
            let at = std::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
            // SAFETY: as the caller says.
            bytes.extend_from_slice(unsafe { slice::from_raw_parts(at, sge.length as usize) });
        }
    }
    Ok(SgeList::inline(&bytes))
}

/// Returns the binding of a window of type 2 to a key that the program has chosen.
///
/// # Safety
/// The objects that it names were made, and are not destroyed.
pub(crate) unsafe fn bind(wr: &abi::BindMwWr) -> Result<Operation, c_int> {
    let info = wr.bind_info;
    if info.mr.is_null() {
        return Err(libc::EINVAL);
    }
    Ok(Operation::Bind(Bind {
        window: RKey(wr.rkey),
        // SAFETY: a region that was made, says the caller.
        region: LKey(unsafe { (*info.mr).lkey }),
        va: info.addr,
        length: info.length,
        access: memory::window_access(info.mw_access_flags)?,
    }))
}

/// Converts a request into the vocabulary.
///
/// # Safety
/// The objects that the request names live, as `ibv_post_send(3)` says.
unsafe fn request(own: &QpObject, wr: &abi::SendWr) -> Result<SendRequest, c_int> {
    use abi::wr_opcode::*;
    let imm = u32::from_be(wr.imm_data);
    // SAFETY: the operation says which part of the union is meant; all are numbers.
    let (rdma, atomic, ud) = unsafe { (wr.wr.rdma, wr.wr.atomic, wr.wr.ud) };
    let (va, rkey) = (rdma.remote_addr, RKey(rdma.rkey));
    let operation = match wr.opcode {
        SEND => Operation::Send { imm: None },
        SEND_WITH_IMM => Operation::Send { imm: Some(imm) },
        SEND_WITH_INV => Operation::SendInvalidate {
            rkey: RKey(wr.imm_data),
        },
        RDMA_WRITE => Operation::Write { va, rkey, imm: None },
        RDMA_WRITE_WITH_IMM => Operation::Write {
            va,
            rkey,
            imm: Some(imm),
        },
        RDMA_READ => Operation::Read { va, rkey },
        ATOMIC_CMP_AND_SWP => Operation::CompareSwap {
            va,
            rkey: RKey(atomic.rkey),
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        ATOMIC_FETCH_AND_ADD => Operation::FetchAdd {
            va,
            rkey: RKey(atomic.rkey),
            add: atomic.compare_add,
        },
        // SAFETY: as the caller says.
        BIND_MW => unsafe { bind(&wr.bind_mw) }?,
        LOCAL_INV => Operation::LocalInvalidate {
            rkey: RKey(wr.imm_data),
        },
        _ => return Err(libc::EOPNOTSUPP),
    };
    let to = match own.pair.qp_type() {
        // SAFETY: a handle that was made, says the caller.
        QpType::Ud => unsafe { AhObject::of(ud.ah) }?.target(ud.remote_qpn, ud.remote_qkey)?,
        QpType::XrcSend if !operation.is_local() => Target::Srq(Srqn(wr.remote_srqn)),
        _ => Target::Connected,
    };
    // SAFETY: as the caller says.
    let list = unsafe { elements(wr.sg_list, wr.num_sge) }?;
    if list.len() > own.cap.max_send_sge as usize {
        return Err(libc::EINVAL);
    }
    let sges = if wr.send_flags & abi::SEND_INLINE == 0 {
        sges(list)
    } else {
        // SAFETY: as the caller says.
        unsafe { inline(list) }?
    };
    let mut flags = SendFlags::from_bits_truncate(wr.send_flags);
    if own.signal_all {
        flags |= SendFlags::SIGNALED;
    }
    Ok(SendRequest {
        wr_id: wr.wr_id,
        operation,
        sges,
        flags,
        to,
    })
}

pub(crate) fn errno_of_post(error: &PostError) -> c_int {
    match error {
        PostError::QueueFull => libc::ENOMEM,
        _ => libc::EINVAL,
    }
}

pub(crate) unsafe extern "C" fn post_send(
    pair: *mut abi::Qp,
    wr: *mut abi::SendWr,
    bad: *mut *mut abi::SendWr,
) -> c_int {
    // SAFETY: a queue pair that was made, says the caller.
    let own = unsafe { QpObject::of(pair) };
    // SAFETY: null or a request of the caller's list.
    let is_one = unsafe { wr.as_ref() }.is_some_and(|only| only.next.is_null());
    let posted = if is_one {
        // SAFETY: as the caller says.
        let posted = unsafe { request(own, &*wr) }
            .and_then(|request| own.pair.post_send(request).map_err(|error| errno_of_post(&error)));
        posted.map_err(|errno| (wr, errno))
    } else {
        // SAFETY: as the caller says.
        unsafe { post_chain(own, wr) }
    };
    let Err((failed, errno)) = posted else { return 0 };
    // SAFETY: a place of the caller's.
    unsafe { *bad = failed };
    errno
}

/// Posts the requests of a list as one: their packets leave together, and their peer and the engine's thread are woken once.
/// Fails with the first request that is not accepted; those before it are posted.
///
/// # Safety
/// The list and what it names live, says `ibv_post_send(3)`.
unsafe fn post_chain(own: &QpObject, first: *mut abi::SendWr) -> Result<(), (*mut abi::SendWr, c_int)> {
    let (mut requests, mut wr, mut malformed) = (Vec::new(), first, Ok(()));
    // SAFETY: null or a request of the list.
    while let Some(next) = unsafe { wr.as_ref() } {
        // SAFETY: as the caller says.
        match unsafe { request(own, next) } {
            Ok(request) => requests.push(request),
            Err(errno) => {
                malformed = Err((wr, errno));
                break;
            }
        }
        wr = next.next;
    }
    own.pair.post_send_list(requests).map_err(|failed| {
        let mut wr = first;
        for _ in 0..failed.index {
            // SAFETY: as many requests of the list were read above.
            wr = unsafe { (*wr).next };
        }
        (wr, errno_of_post(&failed.source))
    })?;
    malformed
}

pub(crate) unsafe extern "C" fn post_recv(
    pair: *mut abi::Qp,
    mut wr: *mut abi::RecvWr,
    bad: *mut *mut abi::RecvWr,
) -> c_int {
    // SAFETY: a queue pair that was made, says the caller.
    let own = unsafe { QpObject::of(pair) };
    // SAFETY: null or a request of the caller's list.
    while let Some(next) = unsafe { wr.as_ref() } {
        // SAFETY: the list's elements live, says the caller.
        let posted = unsafe { elements(next.sg_list, next.num_sge) }.and_then(|list| {
            if list.len() > own.cap.max_recv_sge as usize {
                return Err(libc::EINVAL);
            }
            let request = RecvRequest {
                wr_id: next.wr_id,
                sges: sges(list),
            };
            own.pair.post_recv(request).map_err(|error| errno_of_post(&error))
        });
        if let Err(errno) = posted {
            // SAFETY: a place of the caller's.
            unsafe { *bad = wr };
            return errno;
        }
        wr = next.next;
    }
    0
}

/// Returns the queue pair of a device that has a number.
///
/// # Safety
/// The context is open.
pub(crate) unsafe fn numbered(context: *mut abi::Context, qpn: u32) -> Option<QueuePair> {
    // SAFETY: an open context, says the caller.
    let objects = unsafe { ContextObject::of(context) }.objects();
    let pair = *objects.pairs.get(&qpn)?;
    // SAFETY: it is there while it is among the objects, which are held.
    Some(unsafe { QpObject::of(pair) }.pair.clone())
}

/// Records that a connection has brought a queue pair to a state, with attributes that a program may query.
pub(crate) fn tell(context: *mut abi::Context, qpn: Qpn, attr: &abi::QpAttr, mask: u32) {
    // SAFETY: a context of ids, which is never closed.
    let objects = unsafe { ContextObject::of(context) }.objects();
    if let Some(pair) = objects.pairs.get(&qpn.value()) {
        // SAFETY: it is there while it is among the objects, which are held.
        let own = unsafe { QpObject::of(*pair) };
        let mut kept = own.attributes.lock();
        keep(&mut kept, attr, mask);
        kept.qp_state = attr.qp_state;
        // SAFETY: the program's own structure, of which nothing but the state is ever written.
        unsafe { (**pair).state = attr.qp_state };
    }
}
