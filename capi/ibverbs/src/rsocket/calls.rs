//! The calls of rsocket.h.

use std::ffi::{c_int, c_long, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_memory::ApplicationMemory;
use rdmux_verbs::Access;

use super::buffers::Buffers;
use super::datagram::Datagram;
use super::options::SocketOptions;
use super::resources::register_errno;
use super::{Role, Socket, SocketState, Wait, open, poll};
use crate::cm::{read_address, write_address};
use crate::{errno, set_errno};

/// Time for which `rshutdown` or `rclose` waits until sent data has arrived, unless `SO_LINGER` is set.
const LINGER: Duration = Duration::from_secs(10);
/// Maximum number of buffers of one call.
const IOV_MAX: usize = 1_024;
/// Supported flags.
const FLAGS: c_int = libc::MSG_DONTWAIT
    | libc::MSG_NOSIGNAL
    | libc::MSG_PEEK
    | libc::MSG_WAITALL
    | libc::MSG_TRUNC
    | libc::MSG_MORE
    | libc::MSG_CMSG_CLOEXEC;

/// Makes a call, and returns its value: a number, or -1 and `errno`. A call that succeeds leaves `errno` as it was, like one of the
/// system's, though waits for locks and other steps on its way may set it: rstream prints what `rconnect` left there when a later
/// `rpoll` has reported the failure.
fn result<T: TryInto<isize>>(call: impl FnOnce() -> Result<T, c_int>) -> isize {
    let before = errno();
    let (value, errno) = match call().map(TryInto::try_into) {
        Ok(Ok(number)) => (number, before),
        Ok(Err(_)) => (-1, libc::EOVERFLOW),
        Err(errno) => (-1, errno),
    };
    set_errno(errno);
    value
}

/// Like [`result`], for calls that return an `int`.
fn int<T: TryInto<isize>>(call: impl FnOnce() -> Result<T, c_int>) -> c_int {
    result(call) as c_int
}

fn status(call: impl FnOnce() -> Result<(), c_int>) -> c_int {
    int(|| call().map(|()| 0isize))
}

#[unsafe(no_mangle)]
extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    int(|| make(domain, kind, protocol).map(|socket| socket.number() as isize))
}

fn make(domain: c_int, kind: c_int, protocol: c_int) -> Result<Arc<Socket>, c_int> {
    if ![libc::AF_INET, libc::AF_INET6].contains(&domain) {
        return Err(libc::EAFNOSUPPORT);
    }
    let role = match (kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC), protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => Role::New,
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => Role::Datagram(Box::new(Datagram::new())),
        (libc::SOCK_STREAM | libc::SOCK_DGRAM, _) => return Err(libc::EPROTONOSUPPORT),
        _ => return Err(libc::ESOCKTNOSUPPORT),
    };
    let socket = Socket::new(domain, role, SocketOptions::default())?;
    socket
        .nonblocking
        .store(kind & libc::SOCK_NONBLOCK != 0, Ordering::Relaxed);
    Ok(socket)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rbind(socket: c_int, address: *const libc::sockaddr, _: libc::socklen_t) -> c_int {
    // SAFETY: an address of the caller's.
    let address = unsafe { read_address(address) };
    status(|| {
        let socket = Socket::get(socket)?;
        let address = address?;
        let mut state = socket.lock();
        let SocketState { role, options, .. } = &mut *state;
        if let Role::Datagram(datagram) = role {
            return datagram.bind(address, options);
        }
        state.bind(address).map_err(|errno| match errno {
            libc::ENODEV => libc::EADDRNOTAVAIL,
            other => other,
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn rlisten(socket: c_int, _: c_int) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        let mut state = socket.lock();
        if matches!(state.role, Role::New) {
            let any: IpAddr = match socket.domain {
                libc::AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
                _ => Ipv4Addr::UNSPECIFIED.into(),
            };
            state.bind(SocketAddr::new(any, 0))?;
        }
        match &mut state.role {
            Role::Bound(listening) => listening.accepts = true,
            Role::Datagram(_) => return Err(libc::EOPNOTSUPP),
            _ => return Err(libc::EINVAL),
        }
        state.wake();
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn raccept(
    socket: c_int,
    address: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    int(|| {
        let socket = Socket::get(socket)?;
        let made = socket.block(socket.wait_of(0), |state| open::accept(&socket, state))?;
        let remote = made.lock().remote;
        // SAFETY: places of the caller's, or none.
        unsafe { tell_address(&made, remote, address, length) };
        Ok(made.number() as isize)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rconnect(socket: c_int, address: *const libc::sockaddr, _: libc::socklen_t) -> c_int {
    // SAFETY: an address of the caller's.
    let peer = unsafe { read_address(address) };
    status(|| {
        let socket = Socket::get(socket)?;
        let peer = peer?;
        if let Role::Datagram(datagram) = &mut socket.lock().role {
            datagram.connected = Some(peer);
            return Ok(());
        }
        open::connect(&socket, peer)?;
        let waited = socket.block(socket.wait_of(0), |state| match state.role {
            Role::Opening(_) => None,
            _ => Some(state.stream().map(|_| ())),
        });
        waited.map_err(|errno| {
            if errno == libc::EAGAIN {
                libc::EINPROGRESS
            } else {
                errno
            }
        })
    })
}

/// Waits until sent data has arrived or is lost, or the time is over.
fn flush(socket: &Socket, limit: Duration) {
    let wait = Wait::Until(Instant::now() + limit);
    let flushed = || {
        socket.block(wait, |state| match &state.role {
            Role::Stream(stream) if !stream.is_flushed() => None,
            Role::Datagram(datagram) if !datagram.is_flushed() => None,
            _ => Some(Ok(())),
        })
    };
    // A signal does not end this wait, which has a limit anyway.
    while flushed() == Err(libc::EINTR) {}
}

#[unsafe(no_mangle)]
extern "C" fn rshutdown(socket: c_int, how: c_int) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        if !(libc::SHUT_RD..=libc::SHUT_RDWR).contains(&how) {
            return Err(libc::EINVAL);
        }
        let mut state = socket.lock();
        match &mut state.role {
            Role::Bound(listening) => listening.accepts = false,
            Role::Datagram(_) => {}
            _ => state.stream()?.shut(how),
        }
        state.wake();
        drop(state);
        flush(&socket, LINGER);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn rclose(socket: c_int) -> c_int {
    status(|| {
        let socket = Socket::take(socket)?;
        if !socket.is_own() {
            // The socket's contents belong to the parent, and stay.
            std::mem::forget(socket);
            return Ok(());
        }
        let mut state = socket.lock();
        let limit = state.options.linger.unwrap_or(LINGER);
        if let Role::Stream(stream) = &mut state.role
            && !limit.is_zero()
        {
            stream.shut(libc::SHUT_RDWR);
        }
        drop(state);
        if !limit.is_zero() {
            flush(&socket, limit);
        }
        socket.lock().close();
        Ok(())
    })
}

/// Returns the program's list of buffers.
///
/// # Safety
/// As of `readv(2)`.
unsafe fn list<'a>(buffers: *const libc::iovec, count: usize) -> Result<Buffers<'a>, c_int> {
    if count > IOV_MAX {
        return Err(libc::EMSGSIZE);
    }
    let list = if count == 0 {
        &[]
    } else {
        // SAFETY: as many as the caller says.
        unsafe { slice::from_raw_parts(buffers, count) }
    };
    // SAFETY: as the caller says.
    unsafe { Buffers::new(list) }
}

fn send(socket: c_int, from: &mut Buffers<'_>, flags: c_int, to: Option<SocketAddr>) -> Result<usize, c_int> {
    let socket = Socket::get(socket)?;
    if flags & !FLAGS != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let (wait, total) = (socket.wait_of(flags), from.left());
    let mut is_whole = false;
    let sent = socket.block(wait, |state| {
        let SocketState { role, options, .. } = state;
        match role {
            Role::Opening(_) => None,
            Role::Datagram(datagram) => {
                is_whole = true;
                match to.or(datagram.connected) {
                    Some(to) => datagram.send(to, from, options),
                    None => Some(Err(libc::EDESTADDRREQ)),
                }
            }
            _ => match state.stream().and_then(|stream| stream.send(from)) {
                Ok(()) if from.left() > 0 => None,
                done => Some(done),
            },
        }
    });
    match (sent, total - from.left()) {
        // A stream reports the error of bytes that could not be sent next time; a datagram is sent as a whole.
        (Err(errno), some) if some == 0 || is_whole => Err(errno),
        (_, some) => Ok(some),
    }
}

/// Result of a receive: the number of bytes, their sender, and whether there were more.
struct Received {
    bytes: usize,
    from: Option<SocketAddr>,
    is_cut: bool,
}

fn receive(number: c_int, into: &mut Buffers<'_>, flags: c_int) -> Result<(Arc<Socket>, Received), c_int> {
    let socket = Socket::get(number)?;
    if flags & !FLAGS != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let peek = flags & libc::MSG_PEEK != 0;
    let all = flags & libc::MSG_WAITALL != 0 && !peek;
    let mut bytes = 0;
    let got = socket.block(socket.wait_of(flags), |state| match &mut state.role {
        Role::Opening(_) => None,
        Role::Datagram(datagram) => datagram.receive(into, peek).map(|(from, taken, length)| {
            let is_cut = taken < length;
            let bytes = if flags & libc::MSG_TRUNC != 0 {
                length
            } else {
                taken
            };
            Ok(Received {
                bytes,
                from: Some(from),
                is_cut,
            })
        }),
        _ => {
            let stream = match state.stream() {
                Ok(stream) => stream,
                Err(errno) => return Some(Err(errno)),
            };
            let n = match if peek {
                stream.receive(&mut into.peek(), true)
            } else {
                stream.receive(into, false)
            }? {
                Ok(n) => n,
                Err(errno) => return Some(Err(errno)),
            };
            bytes += n;
            let (from, is_cut) = (None, false);
            (!all || n == 0 || into.left() == 0).then_some(Ok(Received { bytes, from, is_cut }))
        }
    });
    match got {
        Err(_) if bytes > 0 => {
            let (from, is_cut) = (None, false);
            Ok((socket, Received { bytes, from, is_cut }))
        }
        got => got.map(|got| (socket, got)),
    }
}

fn one(bytes: *const c_void, length: usize) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: bytes.cast_mut(),
        iov_len: length,
    }]
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rsend(socket: c_int, bytes: *const c_void, length: usize, flags: c_int) -> isize {
    let buffers = one(bytes, length);
    // SAFETY: bytes of the caller's, which are only read.
    result(|| send(socket, &mut unsafe { Buffers::new(&buffers) }?, flags, None))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rwrite(socket: c_int, bytes: *const c_void, length: usize) -> isize {
    // SAFETY: as the caller says.
    unsafe { rsend(socket, bytes, length, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rwritev(socket: c_int, buffers: *const libc::iovec, count: c_int) -> isize {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    // SAFETY: as the caller says.
    result(|| send(socket, &mut unsafe { list(buffers, count) }?, 0, None))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rsendto(
    socket: c_int,
    bytes: *const c_void,
    length: usize,
    flags: c_int,
    to: *const libc::sockaddr,
    _: libc::socklen_t,
) -> isize {
    let buffers = one(bytes, length);
    // SAFETY: an address of the caller's, or none.
    let to = (!to.is_null()).then(|| unsafe { read_address(to) }).transpose();
    result(|| {
        // SAFETY: bytes of the caller's, which are only read.
        send(socket, &mut unsafe { Buffers::new(&buffers) }?, flags, to?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rsendmsg(socket: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    // SAFETY: a message of the caller's.
    let message = unsafe { &*message };
    let to = message.msg_name.cast::<libc::sockaddr>();
    // SAFETY: an address of the caller's, or none.
    let to = (!to.is_null()).then(|| unsafe { read_address(to) }).transpose();
    result(|| {
        // SAFETY: buffers of the caller's, which are only read.
        let mut from = unsafe { list(message.msg_iov, message.msg_iovlen) }?;
        send(socket, &mut from, flags, to?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rrecv(socket: c_int, bytes: *mut c_void, length: usize, flags: c_int) -> isize {
    let buffers = one(bytes, length);
    result(|| {
        // SAFETY: bytes of the caller's.
        let (_, got) = receive(socket, &mut unsafe { Buffers::new(&buffers) }?, flags)?;
        Ok(got.bytes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rread(socket: c_int, bytes: *mut c_void, length: usize) -> isize {
    // SAFETY: as the caller says.
    unsafe { rrecv(socket, bytes, length, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rreadv(socket: c_int, buffers: *const libc::iovec, count: c_int) -> isize {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    result(|| {
        // SAFETY: as the caller says.
        let (_, got) = receive(socket, &mut unsafe { list(buffers, count) }?, 0)?;
        Ok(got.bytes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rrecvfrom(
    socket: c_int,
    bytes: *mut c_void,
    length: usize,
    flags: c_int,
    from: *mut libc::sockaddr,
    from_length: *mut libc::socklen_t,
) -> isize {
    let buffers = one(bytes, length);
    result(|| {
        // SAFETY: bytes of the caller's.
        let (socket, got) = receive(socket, &mut unsafe { Buffers::new(&buffers) }?, flags)?;
        // SAFETY: places of the caller's, or none.
        unsafe { tell_address(&socket, got.from, from, from_length) };
        Ok(got.bytes)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rrecvmsg(socket: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
    // SAFETY: a message of the caller's.
    let message = unsafe { &mut *message };
    result(|| {
        // SAFETY: buffers of the caller's.
        let mut into = unsafe { list(message.msg_iov, message.msg_iovlen) }?;
        let (socket, got) = receive(socket, &mut into, flags)?;
        // SAFETY: a place of the caller's, or none.
        unsafe {
            tell_address(
                &socket,
                got.from,
                message.msg_name.cast(),
                &raw mut message.msg_namelen,
            )
        };
        message.msg_controllen = 0;
        message.msg_flags = if got.is_cut { libc::MSG_TRUNC } else { 0 };
        Ok(got.bytes)
    })
}

/// Writes an address, if there is one and the caller wants it.
///
/// # Safety
/// Null, or as much room as `length` says.
unsafe fn tell_address(
    socket: &Socket,
    address: Option<SocketAddr>,
    into: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) {
    if into.is_null() || length.is_null() {
        return;
    }
    match address {
        // SAFETY: as the caller says.
        Some(address) => unsafe { write_address(address, socket.domain, into, length) },
        // SAFETY: a place of the caller's.
        None => unsafe { *length = 0 },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rgetsockname(
    socket: c_int,
    into: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        let state = socket.lock();
        let local = match &state.role {
            Role::Datagram(datagram) => datagram.name(),
            _ => state.local,
        };
        let any: IpAddr = match socket.domain {
            libc::AF_INET6 => Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        let local = local.unwrap_or(SocketAddr::new(any, 0));
        // SAFETY: places of the caller's.
        unsafe { tell_address(&socket, Some(local), into, length) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rgetpeername(
    socket: c_int,
    into: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        let state = socket.lock();
        let remote = match &state.role {
            Role::Stream(_) => state.remote,
            Role::Datagram(datagram) => datagram.connected,
            _ => None,
        };
        let remote = remote.ok_or(libc::ENOTCONN)?;
        // SAFETY: places of the caller's.
        unsafe { tell_address(&socket, Some(remote), into, length) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rsetsockopt(
    socket: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: libc::socklen_t,
) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        if value.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: as many bytes of the caller's.
        let value = unsafe { slice::from_raw_parts(value.cast::<u8>(), length as usize) };
        socket.lock().set_option(level, name, value)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rgetsockopt(
    socket: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut libc::socklen_t,
) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        if value.is_null() || length.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: as much room of the caller's as it says.
        let into = unsafe { slice::from_raw_parts_mut(value.cast::<u8>(), *length as usize) };
        let n = socket.lock().get_option(&socket, level, name, into)?;
        // SAFETY: a place of the caller's.
        unsafe { *length = n as libc::socklen_t };
        Ok(())
    })
}

/// Declared with `...` in the header: its third argument, if given, is passed like any other.
#[unsafe(no_mangle)]
extern "C" fn rfcntl(socket: c_int, command: c_int, argument: c_long) -> c_int {
    int(|| {
        let socket = Socket::get(socket)?;
        match command {
            libc::F_GETFL => {
                let nonblocking = socket.nonblocking.load(Ordering::Relaxed);
                Ok((libc::O_RDWR | if nonblocking { libc::O_NONBLOCK } else { 0 }) as isize)
            }
            libc::F_SETFL => {
                let nonblocking = argument & c_long::from(libc::O_NONBLOCK) != 0;
                socket.nonblocking.store(nonblocking, Ordering::Relaxed);
                Ok(0)
            }
            libc::F_GETFD | libc::F_SETFD => {
                // SAFETY: a descriptor that is open, and a number.
                let got = unsafe { libc::fcntl(socket.number(), command, argument) };
                if got < 0 {
                    return Err(std::io::Error::last_os_error()
                        .raw_os_error()
                        .unwrap_or(libc::EIO));
                }
                Ok(got as isize)
            }
            _ => Err(libc::EINVAL),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rpoll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout_ms: c_int) -> c_int {
    let fds = if count == 0 {
        &mut []
    } else {
        // SAFETY: as many entries of the caller's.
        unsafe { slice::from_raw_parts_mut(fds, count as usize) }
    };
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    int(|| poll::poll(fds, timeout))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rselect(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    // SAFETY: a time of the caller's, or none.
    let timeout = unsafe { timeout.as_ref() }.map(|time| {
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let micros = u64::try_from(time.tv_usec).unwrap_or(0);
        Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros))
    });
    // SAFETY: sets of the caller's, or none.
    int(|| unsafe { poll::select(count, [read, write, except], timeout) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn riomap(
    socket: c_int,
    buffer: *mut c_void,
    length: usize,
    protection: c_int,
    _: c_int,
    offset: libc::off_t,
) -> libc::off_t {
    let address = buffer.expose_provenance() as u64;
    let mapped = || {
        let socket = Socket::get(socket)?;
        let bytes = u32::try_from(length).map_err(|_| libc::EINVAL)?;
        if ![libc::PROT_NONE, libc::PROT_WRITE].contains(&protection) || bytes == 0 {
            return Err(libc::EINVAL);
        }
        let mut state = socket.lock();
        let stream = state.stream()?;
        // SAFETY: memory of the program, which gives it to its peer, until `riounmap` or the end of the socket.
        let memory = unsafe { ApplicationMemory::new(address, bytes.into()) };
        let is_shown = protection == libc::PROT_WRITE;
        let access = if is_shown {
            Access::LOCAL_WRITE | Access::REMOTE_WRITE
        } else {
            Access::LOCAL_WRITE
        };
        let registered = stream.own.qp.pd().reg_mr_all(Arc::new(memory), address, access);
        let mr = registered.map_err(|error| register_errno(&error))?;
        let offset = if offset == -1 {
            address
        } else {
            offset.cast_unsigned()
        };
        stream.iomaps.add(mr, is_shown.then_some(offset))?;
        Ok(offset.cast_signed() as isize)
    };
    result(mapped) as libc::off_t
}

#[unsafe(no_mangle)]
extern "C" fn riounmap(socket: c_int, buffer: *mut c_void, length: usize) -> c_int {
    status(|| {
        let socket = Socket::get(socket)?;
        let mut state = socket.lock();
        state.stream()?.iomaps.remove(buffer.addr() as u64, length as u64)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn riowrite(
    socket: c_int,
    bytes: *const c_void,
    length: usize,
    offset: libc::off_t,
    flags: c_int,
) -> usize {
    let buffers = one(bytes, length);
    let written = || {
        // SAFETY: bytes of the caller's, which are only read.
        let mut from = unsafe { Buffers::new(&buffers) }?;
        let socket = Socket::get(socket)?;
        let mut offset = offset.cast_unsigned();
        let done = socket.block(socket.wait_of(flags), |state| {
            let stream = match state.stream() {
                Ok(stream) => stream,
                Err(errno) => return Some(Err(errno)),
            };
            match stream.write_mapped(&mut from, &mut offset) {
                Ok(()) if from.left() > 0 => None,
                done => Some(done),
            }
        });
        match length - from.left() {
            0 => done.map(|()| 0),
            some => Ok(some),
        }
    };
    result(written).cast_unsigned()
}
