//! Devices: found by their address, opened once for each [`Device`], so that each has its own asynchronous events.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rdmux_memory::Pages;
use rdmux_rnic::{Counters, Cqn, Memory, QpType, Qpn, RegionSpec, RegisterError, Srqn, Status, WindowType};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{
    AsyncEvent, ConnectError, ConnectPair, ConnectParams, CreateError, DeviceModeration, Features, Limits,
    ListenError, Options, QpOptions, Reach, ResolveError, Unsupported, abi, provider,
};
use rdmux_wire::cm::{ServiceId, to_gid};
use rdmux_wire::roce::PathMtu;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::answer::Answering;
use super::cm::{Cm, Connecting, Listener};
use super::cma;
use super::cq::CompletionQueue;
use super::library::{Library, LibraryError};
use super::metrics;
use super::objects::{Context, Cq, Pd, Qp, QpInit, Xrcd};
use super::qp::QueuePair;
use super::region::{MemoryRegion, MemoryWindow};
use super::resources::{self, ObjectEntry};
use super::sidr::{DatagramListener, Resolving};
use super::srq::SharedReceiveQueue;

/// Why an RNIC could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system's libraries cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The system has no RDMA device at all.
    #[error(
        "this host has no RDMA device ({0}): `rdma link` lists them; without one omit --provider hw and RDMUX_PROVIDER"
    )]
    NoDevices(io::Error),
    /// The address belongs to no RDMA device.
    #[error("no RDMA device has the address {address}{}", list(.others))]
    NoDevice {
        /// The address.
        address: IpAddr,
        /// The devices of this host and their addresses.
        others: Vec<(String, IpAddr)>,
    },
    /// A call failed.
    #[error("opening the RDMA device {device}: {source}")]
    Io {
        /// Name of the device.
        device: String,
        /// Cause.
        source: io::Error,
    },
}

fn list(others: &[(String, IpAddr)]) -> String {
    if others.is_empty() {
        return ": `rdma link` lists the devices, `ip address` their addresses".into();
    }
    let list: Vec<String> = others
        .iter()
        .map(|(name, address)| format!("{address} ({name})"))
        .collect();
    format!(": there is {}", list.join(", "))
}

/// Returns the RDMA devices of this host and their addresses, from the system's own list of GIDs.
pub(crate) fn devices() -> Vec<(String, IpAddr)> {
    let mut found = Vec::new();
    for device in folder("/sys/class/infiniband") {
        for port in folder(format!("/sys/class/infiniband/{device}/ports")) {
            let gids = format!("/sys/class/infiniband/{device}/ports/{port}/gids");
            for index in folder(&gids) {
                let gid = fs::read_to_string(format!("{gids}/{index}")).unwrap_or_default();
                let Ok(gid) = gid.trim().parse::<std::net::Ipv6Addr>() else {
                    continue;
                };
                let address = rdmux_wire::cm::from_gid(gid);
                let is_link_local = matches!(address, IpAddr::V6(gid) if gid.is_unicast_link_local());
                let entry = (device.clone(), address);
                if !gid.is_unspecified() && !is_link_local && !found.contains(&entry) {
                    found.push(entry);
                }
            }
        }
    }
    found
}

/// Returns whether the kernel has no RDMA devices. A kernel that cannot be asked may have some.
fn has_no_devices() -> bool {
    match fs::read_dir("/sys/class/infiniband") {
        Ok(mut devices) => devices.next().is_none(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Returns why this process may not open the file by which programs reach a device; `None`: it may, or the file is not known.
fn refused_by(name: &str) -> Option<OpenError> {
    let verbs = Path::new("/sys/class/infiniband_verbs");
    let is_its = |entry: &String| {
        let device = fs::read_to_string(verbs.join(entry).join("ibdev"));
        device.is_ok_and(|device| device.trim() == name)
    };
    let entry = folder(verbs).into_iter().find(is_its)?;
    refused_to(&format!("/dev/infiniband/{entry}"))
}

/// Returns why this process may not open a device's file; `None`: it may.
fn refused_to(file: &str) -> Option<OpenError> {
    let source = fs::File::options().read(true).write(true).open(file).err()?;
    Some(OpenError::Io {
        device: file.into(),
        source,
    })
}

/// Returns the names in a folder, sorted; none if it cannot be read.
pub(super) fn folder(path: impl AsRef<Path>) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// State that all objects of a device share.
#[derive(Debug)]
pub(super) struct DeviceInner {
    pub(super) context: Arc<Context>,
    pub(super) library: &'static Library,
    pub(super) address: IpAddr,
    pub(super) port: u8,
    /// Index of the address in the port's table of GIDs; `None` on links that have no GIDs of addresses.
    sgid_index: Option<u8>,
    pub(super) attr: abi::DeviceAttrEx,
    features: OnceLock<Features>,
    moderates: OnceLock<bool>,
    pub(super) waiting: Option<WaitMode>,
    pub(super) moderation: Arc<DeviceModeration>,
    pub(super) cm: OnceLock<Result<Cm, Errno>>,
    next_number: AtomicU32,
    entries: Mutex<BTreeMap<u32, ObjectEntry>>,
    /// Answers tools; it may be missing, which matters to nobody else.
    answering: OnceLock<Option<Answering>>,
    /// Why queue pairs went to error, according to their completions.
    errors: Mutex<HashMap<u32, Status>>,
}

/// Entry that tools see of an object as long as it lives.
#[derive(Debug)]
pub(super) struct Listed(Arc<DeviceInner>, u32);

impl Listed {
    pub(super) fn new(device: &Device, entry: ObjectEntry) -> Listed {
        let number = device.next_number();
        device.0.entries().insert(number, entry);
        Listed(device.0.clone(), number)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let entry = self.0.entries().remove(&self.1);
        drop(entry);
    }
}

impl DeviceInner {
    pub(super) fn entries(&self) -> MutexGuard<'_, BTreeMap<u32, ObjectEntry>> {
        self.entries.lock()
    }
}

/// An RDMA device with one address (GID).
#[derive(Clone, Debug)]
pub(crate) struct Device(pub(super) Arc<DeviceInner>);

impl Device {
    /// Opens the device that has a local address.
    pub(crate) fn open(address: IpAddr, options: &Options) -> Result<Device, OpenError> {
        let address = address.to_canonical();
        let library = Library::get()?;
        let (name, port) = match cma::device_of(library, address) {
            Ok(found) => found,
            Err(error) if has_no_devices() => return Err(OpenError::NoDevices(error.into())),
            Err(Errno::NODEV | Errno::ADDRNOTAVAIL | Errno::INVAL) => {
                let others = devices();
                let has_it = |(_, other): &&(String, IpAddr)| *other == address;
                // The libraries report a device that may not be opened as one that does not exist.
                let closed = others.iter().find(has_it).and_then(|(name, _)| refused_by(name));
                return Err(closed.unwrap_or(OpenError::NoDevice { address, others }));
            }
            Err(error) => {
                // The library reports a file that may not be opened as one that does not exist.
                return Err(
                    refused_to("/dev/infiniband/rdma_cm").unwrap_or_else(|| OpenError::Io {
                        device: "/dev/infiniband/rdma_cm".into(),
                        source: error.into(),
                    }),
                );
            }
        };
        let failed = |error: Errno| OpenError::Io {
            device: name.clone(),
            source: error.into(),
        };
        let context = Context::open(library, &name);
        let context = context.map_err(|error| refused_by(&name).unwrap_or_else(|| failed(error)))?;
        let context = Arc::new(context);
        let attr = context.query_device().map_err(failed)?;
        let gids = context.query_port(port).map_err(failed)?;
        let is_ethernet = gids.link_layer == abi::LINK_LAYER_ETHERNET;
        let own = to_gid(address).octets();
        let is_own = |index: &u32| {
            let entry = context.query_gid(port, *index);
            entry.is_some_and(|entry| entry.gid.0 == own && entry.gid_type == abi::GID_TYPE_ROCE_V2)
        };
        let gid_count = u32::try_from(gids.gid_tbl_len).unwrap_or(0).min(256);
        let sgid_index = (0..gid_count).find(is_own).filter(|_| is_ethernet);
        let inner = Arc::new(DeviceInner {
            context,
            library,
            address,
            port,
            sgid_index: sgid_index.and_then(|index| u8::try_from(index).ok()),
            attr,
            features: OnceLock::new(),
            moderates: OnceLock::new(),
            waiting: options.waiting,
            moderation: Arc::new(DeviceModeration::new(options.moderation.unwrap_or_default())),
            cm: OnceLock::new(),
            next_number: AtomicU32::new(1),
            entries: Mutex::default(),
            answering: OnceLock::new(),
            errors: Mutex::default(),
        });
        metrics::enlist(&inner);
        inner.answering.get_or_init(|| resources::answer(&inner).ok());
        Ok(Device(inner))
    }

    /// The device's address.
    pub(crate) fn address(&self) -> IpAddr {
        self.0.address
    }

    /// The device's name, as `rdma link` shows it.
    pub(crate) fn name(&self) -> &str {
        self.0.context.name()
    }

    /// Returns whether it moderates the events of completion queues.
    pub(super) fn moderates(&self) -> bool {
        // No device reports it, and some libraries have the function for devices that refuse it.
        let tries = || Cq::new(&self.0.context, 1, 0, 0).and_then(|cq| cq.moderate(0, 0));
        *self.0.moderates.get_or_init(|| tries().is_ok())
    }

    /// Returns its features. The first call tries those that devices do not report.
    pub(crate) fn features(&self) -> Features {
        *self.0.features.get_or_init(|| self.find_features())
    }

    /// Returns the error that it lacks a feature.
    pub(super) fn lacks(&self, feature: Features) -> Unsupported {
        Unsupported {
            feature,
            device: self.name().to_owned(),
        }
    }

    /// Converts an error of creation; one that means a lack of support names the feature.
    pub(super) fn create_error(&self, error: Errno, feature: Features) -> CreateError {
        match error {
            Errno::OPNOTSUPP | Errno::NOSYS | Errno::PROTONOSUPPORT => {
                CreateError::Io(self.lacks(feature).into())
            }
            Errno::NOMEM | Errno::NOSPC => CreateError::NoRoom,
            other => CreateError::Io(other.into()),
        }
    }

    fn find_features(&self) -> Features {
        use abi::device_cap as cap;
        let (attr, caps) = (&self.0.attr.orig_attr, self.0.attr.device_cap_flags_ex);
        let mut features = Features::empty();
        let mut has = |feature, is_there: bool| features.set(feature, is_there);
        has(Features::XRC, caps & cap::XRC != 0);
        has(Features::SRQ, attr.max_srq > 0);
        has(Features::ATOMIC, attr.atomic_cap != 0);
        has(Features::MW_TYPE_1, caps & cap::MEM_WINDOW != 0);
        has(
            Features::MW_TYPE_2,
            caps & (cap::MEM_WINDOW_TYPE_2A | cap::MEM_WINDOW_TYPE_2B) != 0,
        );
        has(
            Features::ON_DEMAND,
            self.0.attr.odp_general_caps & abi::ODP_SUPPORT != 0
                && self.0.attr.odp_rc & abi::ODP_WRITE_AND_READ == abi::ODP_WRITE_AND_READ,
        );
        has(Features::MULTICAST, attr.max_mcast_grp > 0);
        has(Features::BY_ADDRESS, self.0.sgid_index.is_some());
        has(Features::CQ_MODERATION, self.moderates());
        has(Features::SEND_INVALIDATE, caps & cap::MEM_MGT_EXTENSIONS != 0);
        has(Features::UC, self.makes(abi::qp_type::UC, 0));
        has(Features::UD, self.makes(abi::qp_type::UD, 0));
        let flush = caps & (cap::FLUSH_GLOBAL | cap::FLUSH_PERSISTENT) != 0;
        let flush = flush && self.makes(abi::qp_type::RC, abi::qp_ex::FLUSH);
        has(Features::FLUSH_GLOBAL, flush && caps & cap::FLUSH_GLOBAL != 0);
        has(
            Features::FLUSH_PERSISTENT,
            flush && caps & cap::FLUSH_PERSISTENT != 0,
        );
        let atomic_write = caps & cap::ATOMIC_WRITE != 0;
        has(
            Features::ATOMIC_WRITE,
            atomic_write && self.makes(abi::qp_type::RC, abi::qp_ex::ATOMIC_WRITE),
        );
        features
    }

    /// Returns whether it makes queue pairs of a type with these extended operations.
    fn makes(&self, qp_type: u32, extended: u64) -> bool {
        let context = &self.0.context;
        let Ok((pd, cq)) = Pd::new(context).and_then(|pd| Ok((pd, Cq::new(context, 1, 0, 0)?))) else {
            return false;
        };
        let cq = Arc::new(cq);
        let cap = abi::QpCap {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            qp_type,
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            xrcd: None,
            cap,
            extended,
        };
        Qp::new(&Arc::new(pd), init).is_ok_and(|qp| qp.extended() == extended)
    }

    /// Returns the extended operations with which its queue pairs of RC and XRC are made.
    pub(super) fn extended_operations(&self) -> u64 {
        let features = self.features();
        let of = |feature, operation| {
            if features.intersects(feature) {
                operation
            } else {
                0
            }
        };
        of(
            Features::FLUSH_GLOBAL | Features::FLUSH_PERSISTENT,
            abi::qp_ex::FLUSH,
        ) | of(Features::ATOMIC_WRITE, abi::qp_ex::ATOMIC_WRITE)
    }

    /// Returns the next of the provider's own numbers, which completion queues and shared receive queues have.
    pub(super) fn next_number(&self) -> u32 {
        self.0.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the route to an address; `None` on links where addresses are no GIDs.
    pub(super) fn route_to(&self, address: IpAddr, traffic_class: u8) -> Option<abi::AhAttr> {
        Some(abi::AhAttr {
            grh: abi::GlobalRoute {
                dgid: abi::AlignedGid(to_gid(address).octets()),
                flow_label: 0,
                sgid_index: self.0.sgid_index?,
                hop_limit: 64,
                traffic_class,
            },
            is_global: 1,
            port_num: self.0.port,
            ..Default::default()
        })
    }

    /// Returns the path MTU of the device's link.
    fn link_mtu(&self) -> io::Result<PathMtu> {
        let port = self.0.context.query_port(self.0.port)?;
        Ok(PathMtu::from_code(port.active_mtu as u8).unwrap_or(PathMtu::Bytes256))
    }

    fn errors(&self) -> MutexGuard<'_, HashMap<u32, Status>> {
        self.0.errors.lock()
    }

    /// Records why a queue pair went to error: the status of the first completion that gives a reason.
    pub(super) fn note_error(&self, qpn: u32, status: Status) {
        if status != Status::Flushed {
            self.errors().entry(qpn).or_insert(status);
        }
    }

    pub(super) fn error_of(&self, qpn: u32) -> Option<Status> {
        self.errors().get(&qpn).copied()
    }

    pub(super) fn forget_error(&self, qpn: u32) {
        self.errors().remove(&qpn);
    }
}

impl provider::Device for Device {
    /// Returns its limits. A queue pair gets fewer elements and inline bytes where the device has no room for so many.
    fn limits(&self) -> Limits {
        let attr = &self.0.attr.orig_attr;
        let number = |value: c_int| u32::try_from(value).unwrap_or(0);
        let port = self.0.context.query_port(self.0.port);
        Limits {
            queue_pairs: number(attr.max_qp),
            shared_receive_queues: number(attr.max_srq),
            memory_regions: number(attr.max_mr),
            work_requests: Some(number(attr.max_qp_wr)),
            completions: Some(number(attr.max_cqe)),
            sges: number(attr.max_sge).min(Limits::ENGINE.sges),
            inline_bytes: Limits::ENGINE.inline_bytes,
            message_bytes: port.map_or(0, |port| port.max_msg_sz.min(Limits::ENGINE.message_bytes)),
            mcast_groups: number(attr.max_mcast_grp),
            mcast_queue_pairs: number(attr.max_mcast_qp_attach),
        }
    }

    fn moderation(&self) -> Arc<DeviceModeration> {
        self.0.moderation.clone()
    }

    fn features(&self) -> Features {
        Device::features(self)
    }

    fn reach(&self, memory: &dyn Memory) -> Reach {
        match Pages::of(memory) {
            Some(Pages::Stay) => Reach::Direct,
            Some(Pages::ComeAndGo) if self.features().contains(Features::ON_DEMAND) => Reach::OnDemand,
            Some(Pages::ComeAndGo) | None => Reach::Processor,
        }
    }

    fn alloc_pd(&self) -> Result<Box<dyn provider::ProtectionDomain>, CreateError> {
        let pd = Pd::new(&self.0.context).map_err(|error| self.create_error(error, Features::empty()))?;
        let listed = Listed::new(self, ObjectEntry::Pd);
        Ok(Box::new(ProtectionDomain {
            device: self.clone(),
            pd: Arc::new(pd),
            listed: Arc::new(listed),
            registry: Arc::default(),
        }))
    }

    fn alloc_xrcd(&self) -> Result<Box<dyn provider::XrcDomain>, CreateError> {
        let xrcd = Xrcd::new(&self.0.context).map_err(|error| self.create_error(error, Features::XRC))?;
        Ok(Box::new(XrcDomain(Arc::new(xrcd))))
    }

    fn completion_vectors(&self) -> u32 {
        self.0.context.comp_vectors()
    }

    fn create_cq(&self, depth: u32, vector: u32) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        Ok(Box::new(CompletionQueue::new(self, depth, vector)?))
    }

    fn listen(
        &self,
        service: ServiceId,
        qp_types: &[QpType],
    ) -> Result<Box<dyn provider::Listener>, ListenError> {
        Ok(Box::new(Listener::new(self, service, qp_types)?))
    }

    fn start_connect(
        &self,
        pair: ConnectPair<'_>,
        peer: SocketAddr,
        params: &ConnectParams,
        private_data: &[u8],
    ) -> Result<Box<dyn provider::Connecting>, ConnectError> {
        Ok(Box::new(Connecting::start(
            self,
            pair,
            peer,
            params,
            private_data,
        )?))
    }

    fn listen_datagram(&self, port: u16) -> Result<Box<dyn provider::DatagramListener>, ListenError> {
        Ok(Box::new(DatagramListener::new(self, port)?))
    }

    fn start_resolve(
        &self,
        _source_port: u16,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Box<dyn provider::Resolving>, ResolveError> {
        Ok(Box::new(Resolving::start(self, peer, private_data)?))
    }

    /// Returns whether the port is in IBV_PORT_ACTIVE; false when it cannot be queried.
    fn is_active(&self) -> bool {
        let port = self.0.context.query_port(self.0.port);
        port.is_ok_and(|port| port.state == 4)
    }

    fn path_mtu_to(&self, _peer: IpAddr) -> io::Result<PathMtu> {
        self.link_mtu()
    }

    fn active_mtu(&self) -> PathMtu {
        self.link_mtu().unwrap_or(PathMtu::Bytes256)
    }

    /// Returns the counters of the device, as far as its driver reports them under these names. They count for all programs that
    /// use the device.
    fn counters(&self) -> Counters {
        let folder = format!(
            "/sys/class/infiniband/{}/ports/{}/hw_counters",
            self.name(),
            self.0.port
        );
        let read = |name: &str| -> u64 {
            let text = fs::read_to_string(format!("{folder}/{name}")).unwrap_or_default();
            text.trim().parse().unwrap_or(0)
        };
        let packets = |name: &str, of_port: &str| match read(name) {
            0 => read(&format!("../counters/{of_port}")),
            count => count,
        };
        Counters {
            rcvd_pkts: packets("rcvd_pkts", "port_rcv_packets"),
            sent_pkts: packets("sent_pkts", "port_xmit_packets"),
            rx_icrc_encapsulated: read("rx_icrc_encapsulated"),
            duplicate_request: read("duplicate_request"),
            // rxe and mlx5 name these differently.
            out_of_sequence: read("out_of_sequence") + read("out_of_seq_request"),
            packet_seq_err: read("packet_seq_err") + read("rcvd_seq_err"),
            rcvd_rnr_err: read("rcvd_rnr_err"),
            resources_rnr_nak: read("resources_rnr_nak") + read("send_rnr_err"),
            local_ack_timeout_err: read("local_ack_timeout_err"),
            retry_exceeded_err: read("retry_exceeded_err"),
            np_ecn_marked_roce_packets: read("np_ecn_marked_roce_packets"),
            np_cnp_sent: read("np_cnp_sent"),
            rp_cnp_handled: read("rp_cnp_handled"),
            ..Counters::default()
        }
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        use abi::event_type as t;
        loop {
            let event = self.0.context.take_event()?;
            let number = event.number;
            return Some(match event.event_type {
                t::CQ_ERR => AsyncEvent::CqError(Cqn(number)),
                t::QP_FATAL | t::PATH_MIG_ERR => AsyncEvent::QpFatal(Qpn::new(number)),
                t::QP_REQ_ERR => AsyncEvent::QpRequestError(Qpn::new(number)),
                t::QP_ACCESS_ERR => AsyncEvent::QpAccessError(Qpn::new(number)),
                t::COMM_EST => AsyncEvent::CommunicationEstablished(Qpn::new(number)),
                t::SQ_DRAINED => AsyncEvent::SqDrained(Qpn::new(number)),
                t::QP_LAST_WQE_REACHED => AsyncEvent::LastWqeReached(Qpn::new(number)),
                t::SRQ_LIMIT_REACHED => AsyncEvent::SrqLimitReached(Srqn(number)),
                t::PORT_ACTIVE => AsyncEvent::PortActive,
                t::PORT_ERR => AsyncEvent::PortError,
                t::DEVICE_FATAL => AsyncEvent::DeviceFatal,
                // Events that concern subnet management.
                _ => continue,
            });
        }
    }

    fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.0.context.async_fd()
    }

    fn wait_async_event(&self, timeout: Duration) -> Option<AsyncEvent> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.poll_async_event() {
                return Some(event);
            }
            if !matches!(poll_until(&[self.async_event_fd()], deadline), Ok(true)) {
                return self.poll_async_event();
            }
        }
    }

    fn object_counts(&self) -> (usize, usize, usize) {
        let counts = resources::counts(&self.0);
        (counts.qps as usize, counts.mrs as usize, counts.cqs as usize)
    }
}

/// Sleeps until one of the descriptors is readable; returns false if the deadline passes.
///
/// # Errors
/// Fails if one of them has hung up, as the descriptors of a removed device do, and none is readable.
pub(super) fn poll_until(fds: &[BorrowedFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
    let timeout = left.map(|left| rustix::event::Timespec {
        tv_sec: left.as_secs().min(i64::MAX as u64 / 2) as i64,
        tv_nsec: left.subsec_nanos().into(),
    });
    let mut fds: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(0) => Ok(false),
        Ok(_) if fds.iter().any(|fd| fd.revents().contains(PollFlags::IN)) => Ok(true),
        Ok(_) => Err(Errno::NODEV.into()),
        // An interrupted sleep counts as one that ended early.
        Err(_) => Ok(true),
    }
}

/// Protection domain: queue pairs reach the regions of their own domain only.
#[derive(Clone, Debug)]
pub(crate) struct ProtectionDomain {
    device: Device,
    pd: Arc<Pd>,
    listed: Arc<Listed>,
    pub(super) registry: Arc<super::region::Registry>,
}

impl ProtectionDomain {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn object(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Returns the number by which tools know it.
    pub(super) fn number(&self) -> u32 {
        self.listed.1
    }
}

impl provider::ProtectionDomain for ProtectionDomain {
    fn create_qp(&self, options: &QpOptions) -> Result<Box<dyn provider::QueuePair>, CreateError> {
        Ok(Box::new(QueuePair::new(self, options)?))
    }

    fn create_srq(
        &self,
        max_wr: u32,
        xrc: Option<(&rdmux_verbs::XrcDomain, &rdmux_verbs::CompletionQueue)>,
    ) -> Result<Box<dyn provider::SharedReceiveQueue>, CreateError> {
        Ok(Box::new(SharedReceiveQueue::new(self, max_wr, xrc)?))
    }

    fn reg_mr(&self, spec: RegionSpec) -> Result<Box<dyn provider::MemoryRegion>, RegisterError> {
        Ok(Box::new(MemoryRegion::new(self, spec)?))
    }

    fn alloc_mw(&self, window_type: WindowType) -> Result<Box<dyn provider::MemoryWindow>, RegisterError> {
        Ok(Box::new(MemoryWindow::new(self, window_type)?))
    }
}

/// XRC domain.
#[derive(Clone, Debug)]
pub(crate) struct XrcDomain(Arc<Xrcd>);

impl provider::XrcDomain for XrcDomain {}

impl XrcDomain {
    pub(super) fn object(&self) -> &Arc<Xrcd> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn poll_until__tells_an_end_from_something_to_read() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let past = Some(Instant::now());
        assert!(!poll_until(&[reader.as_fd()], past).unwrap());
        rustix::io::write(&writer, &[1]).unwrap();
        drop(writer);
        assert!(poll_until(&[reader.as_fd()], None).unwrap());
        rustix::io::read(&reader, &mut [0u8; 1]).unwrap();
        poll_until(&[reader.as_fd()], None).unwrap_err();
    }
}
