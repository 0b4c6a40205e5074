//! Requests of other processes: JSON-RPC 2.0 on a Unix socket, as SPDK has it, with its names of methods where they fit. docs/nvmf.md lists them.

mod client;

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rdmux_verbs::ledger::Entries;
use rdmux_verbs::provider::folder::runtime_folder;
use rdmux_wire::nvme::{AnaState, HealthLog, Nqn, NsId, TransportKind};
use rustix::fs::{Mode, fchmod};
use rustix::net::{SocketAddrUnix, bind, listen, sockopt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::config::{
    DEFAULT_PORT, HostConfig, NamespaceConfig, OtherHosts, ana_state, ana_state_name, bandwidth,
    check_listener, check_place, discovery, group, in_capsule, iops, nqn, optional_group, queues,
};
use super::{Control, ControlError, ListenerInfo, NamespaceInfo, SubsystemInfo};
use crate::identity;
use crate::server::Listen;
use crate::target::{AnaRule, ControllerInfo, Listener, Referral};
pub use client::{ANSWER_MAX, RpcError, call, names, remove_stale, sockets};

/// Bytes of a request at most.
const REQUEST_MAX: usize = 1 << 20;
/// Connections at a time.
const CONNECTIONS_MAX: usize = 16;
/// Time in which a connection's next request, or the next part of it, has to come.
const IDLE: Duration = Duration::from_secs(60);
/// Time in which a client takes a response.
const ANSWER: Duration = Duration::from_secs(60);

/// Error codes of JSON-RPC 2.0, 5.1.
mod code {
    pub(super) const PARSE: i32 = -32700;
    pub(super) const INVALID_REQUEST: i32 = -32600;
    pub(super) const NO_METHOD: i32 = -32601;
    pub(super) const INVALID_PARAMS: i32 = -32602;
    /// The target refuses.
    pub(super) const REFUSED: i32 = -32000;
}

type Failure = (i32, String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    jsonrpc: String,
    /// Missing from a request that wants no response.
    #[serde(default, deserialize_with = "present")]
    id: Option<Value>,
    method: String,
    #[serde(default)]
    params: Option<Value>,
}

/// Keeps an id of null apart from none.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Name of a subsystem; `None`: the only one.
#[derive(Default)]
struct Name(Option<Nqn>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
        nqn(deserializer).map(|nqn| Name(Some(nqn)))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoParams {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddNamespace {
    #[serde(default)]
    nqn: Name,
    namespace: NamespaceConfig,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneNamespace {
    #[serde(default)]
    nqn: Name,
    nsid: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddHost {
    #[serde(default)]
    nqn: Name,
    #[serde(deserialize_with = "nqn")]
    host: Nqn,
    secret: Option<PathBuf>,
    psk: Option<PathBuf>,
    #[serde(default, deserialize_with = "queues")]
    queues: Option<u16>,
    #[serde(default, deserialize_with = "iops")]
    iops: Option<NonZeroU64>,
    #[serde(default, deserialize_with = "bandwidth")]
    bandwidth: Option<NonZeroU64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneSubsystem {
    #[serde(default)]
    nqn: Name,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneHost {
    #[serde(default)]
    nqn: Name,
    #[serde(deserialize_with = "nqn")]
    host: Nqn,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetOtherHosts {
    #[serde(default)]
    nqn: Name,
    other_hosts: OtherHosts,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneListener {
    listen_address: ListenAddress,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddListener {
    listen_address: ListenAddress,
    #[serde(default, deserialize_with = "in_capsule")]
    in_capsule_data_size: Option<u32>,
    /// Connections begin with TLS.
    #[serde(default)]
    secure_channel: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneReferral {
    address: ListenAddress,
    #[serde(default = "discovery", deserialize_with = "nqn")]
    subnqn: Nqn,
    #[serde(default)]
    secure_channel: bool,
}

impl OneReferral {
    fn referral(self) -> Result<Referral, Failure> {
        let at = self.address.listener()?;
        check_place(&at).map_err(|why| (code::INVALID_PARAMS, why))?;
        Ok(Referral {
            at,
            nqn: self.subnqn,
            is_secure: self.secure_channel,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetAnaState {
    #[serde(default)]
    nqn: Name,
    listen_address: Option<ListenAddress>,
    #[serde(deserialize_with = "ana_state")]
    ana_state: AnaState,
    #[serde(default, deserialize_with = "optional_group")]
    anagrpid: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetAnaGroup {
    #[serde(default)]
    nqn: Name,
    nsid: u32,
    #[serde(deserialize_with = "group")]
    anagrpid: u32,
}

/// An address in SPDK's form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListenAddress {
    trtype: String,
    traddr: IpAddr,
    trsvcid: Option<String>,
    /// The address says it as well.
    #[serde(rename = "adrfam")]
    _adrfam: Option<String>,
}

impl ListenAddress {
    fn listener(&self) -> Result<Listener, Failure> {
        let transport = match self.trtype.to_ascii_lowercase().as_str() {
            "tcp" => TransportKind::Tcp,
            "rdma" => TransportKind::Rdma,
            other => return Err((code::INVALID_PARAMS, format!("'{other}' is neither tcp nor rdma"))),
        };
        let port = match &self.trsvcid {
            None => DEFAULT_PORT,
            Some(port) => port
                .parse()
                .map_err(|_| (code::INVALID_PARAMS, format!("'{port}' is no port")))?,
        };
        let address = SocketAddr::new(self.traddr, port);
        let listener = Listener { transport, address };
        check_listener(&listener).map_err(|why| (code::INVALID_PARAMS, why))?;
        Ok(listener)
    }
}

/// The methods.
const METHODS: [&str; 19] = [
    "nvmf_discovery_add_referral",
    "nvmf_discovery_get_referrals",
    "nvmf_discovery_remove_referral",
    "nvmf_get_subsystems",
    "nvmf_subsystem_add_host",
    "nvmf_subsystem_add_ns",
    "nvmf_subsystem_get_controllers",
    "nvmf_subsystem_get_listeners",
    "nvmf_subsystem_listener_set_ana_state",
    "nvmf_subsystem_remove_host",
    "nvmf_subsystem_remove_ns",
    "nvmf_subsystem_resize_ns",
    "nvmf_subsystem_set_ns_ana_group",
    "nvmf_subsystem_set_other_hosts",
    "nvmf_target_add_listener",
    "nvmf_target_get_ledger",
    "nvmf_target_get_listeners",
    "nvmf_target_remove_listener",
    "rpc_get_methods",
];

/// Returns the response to a request; `None` if it wants none.
pub fn respond(control: &Control, request: &Value) -> Option<Value> {
    let request = match Request::deserialize(request) {
        Ok(request) if request.jsonrpc == "2.0" => request,
        Ok(_) => {
            return Some(failed(
                &Value::Null,
                (code::INVALID_REQUEST, "'jsonrpc' is not \"2.0\"".into()),
            ));
        }
        Err(error) => return Some(failed(&Value::Null, (code::INVALID_REQUEST, error.to_string()))),
    };
    let result = carry_out(control, &request.method, request.params);
    let id = request.id?;
    Some(match result {
        Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
        Err(failure) => failed(&id, failure),
    })
}

fn failed(id: &Value, (code, message): Failure) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": code, "message": message } })
}

fn carry_out(control: &Control, method: &str, params: Option<Value>) -> Result<Value, Failure> {
    let refused = |error: ControlError| (code::REFUSED, error.to_string());
    match method {
        "nvmf_get_subsystems" => {
            parse::<NoParams>(params)?;
            let listeners = control.listeners();
            let subsystems = control.subsystems();
            let subsystems = subsystems.iter().map(|info| subsystem_json(info, &listeners));
            Ok(subsystems.collect())
        }
        "nvmf_subsystem_add_ns" => {
            let AddNamespace { nqn, namespace } = parse(params)?;
            let nsid = control
                .add_namespace(nqn.0.as_ref(), namespace)
                .map_err(refused)?;
            Ok(nsid.0.into())
        }
        "nvmf_subsystem_remove_ns" => {
            let OneNamespace { nqn, nsid } = parse(params)?;
            control
                .remove_namespace(nqn.0.as_ref(), NsId(nsid))
                .map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_subsystem_resize_ns" => {
            let OneNamespace { nqn, nsid } = parse(params)?;
            let is_resized = control.resize_namespace(nqn.0.as_ref(), NsId(nsid));
            Ok(is_resized.map_err(refused)?.into())
        }
        "nvmf_subsystem_get_controllers" => {
            let OneSubsystem { nqn } = parse(params)?;
            let controllers = control.controllers(nqn.0.as_ref()).map_err(refused)?;
            Ok(controllers.iter().map(controller_json).collect())
        }
        "nvmf_subsystem_add_host" => {
            let AddHost {
                nqn,
                host,
                secret,
                psk,
                queues,
                iops,
                bandwidth,
            } = parse(params)?;
            let host = HostConfig {
                nqn: host,
                secret,
                psk,
                queues,
                iops,
                bandwidth,
            };
            control.add_host(nqn.0.as_ref(), host).map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_subsystem_remove_host" => {
            let OneHost { nqn, host } = parse(params)?;
            control.remove_host(nqn.0.as_ref(), &host).map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_subsystem_set_other_hosts" => {
            let SetOtherHosts { nqn, other_hosts } = parse(params)?;
            control
                .set_other_hosts(nqn.0.as_ref(), other_hosts)
                .map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_subsystem_get_listeners" => {
            let OneSubsystem { nqn } = parse(params)?;
            let listeners = control.ana(nqn.0.as_ref()).map_err(refused)?;
            Ok(listeners.iter().map(ana_json).collect())
        }
        "nvmf_subsystem_listener_set_ana_state" => {
            let SetAnaState {
                nqn,
                listen_address,
                ana_state,
                anagrpid,
            } = parse(params)?;
            let at = listen_address.map(|address| address.listener()).transpose()?;
            let rule = AnaRule {
                group: anagrpid,
                at,
                state: ana_state,
            };
            control.set_ana_state(nqn.0.as_ref(), rule).map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_subsystem_set_ns_ana_group" => {
            let SetAnaGroup { nqn, nsid, anagrpid } = parse(params)?;
            control
                .set_ana_group(nqn.0.as_ref(), NsId(nsid), anagrpid)
                .map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_target_add_listener" => {
            let AddListener {
                listen_address,
                in_capsule_data_size,
                secure_channel,
            } = parse(params)?;
            let listen = Listen::from(listen_address.listener()?);
            let listen = Listen {
                in_capsule_bytes: in_capsule_data_size.unwrap_or(listen.in_capsule_bytes),
                tls: secure_channel,
                ..listen
            };
            let listener = control.add_listener(listen).map_err(refused)?;
            Ok(listener_json(&listener))
        }
        "nvmf_target_remove_listener" => {
            let OneListener { listen_address } = parse(params)?;
            control
                .remove_listener(&listen_address.listener()?)
                .map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_target_get_ledger" => {
            parse::<NoParams>(params)?;
            Ok(control
                .ledger()
                .map_or(Value::Null, |entries| ledger_json(&entries)))
        }
        "nvmf_target_get_listeners" => {
            parse::<NoParams>(params)?;
            Ok(control.listening().iter().map(listen_json).collect())
        }
        "nvmf_discovery_add_referral" => {
            control.add_referral(parse::<OneReferral>(params)?.referral()?);
            Ok(true.into())
        }
        "nvmf_discovery_remove_referral" => {
            let referral = parse::<OneReferral>(params)?.referral()?;
            control.remove_referral(referral).map_err(refused)?;
            Ok(true.into())
        }
        "nvmf_discovery_get_referrals" => {
            parse::<NoParams>(params)?;
            Ok(control.referrals().iter().map(referral_json).collect())
        }
        "rpc_get_methods" => {
            parse::<NoParams>(params)?;
            Ok(json!(METHODS))
        }
        _ => Err((
            code::NO_METHOD,
            format!("no method {method}: rpc_get_methods lists them"),
        )),
    }
}

fn parse<T: DeserializeOwned>(params: Option<Value>) -> Result<T, Failure> {
    let params = params.unwrap_or_else(|| json!({}));
    T::deserialize(params).map_err(|error| (code::INVALID_PARAMS, error.to_string()))
}

fn listener_json(listener: &Listener) -> Value {
    let transport = match listener.transport {
        TransportKind::Tcp => "TCP",
        TransportKind::Rdma => "RDMA",
    };
    json!({
        "trtype": transport,
        "adrfam": if listener.address.is_ipv4() { "IPv4" } else { "IPv6" },
        "traddr": listener.address.ip().to_string(),
        "trsvcid": listener.address.port().to_string(),
    })
}

fn listen_json(listen: &Listen) -> Value {
    let mut json = listener_json(&listen.listener);
    json["in_capsule_data_size"] = listen.in_capsule_bytes.into();
    json["secure_channel"] = listen.tls.into();
    json
}

fn referral_json(referral: &Referral) -> Value {
    json!({
        "address": listener_json(&referral.at),
        "subnqn": referral.nqn.as_str(),
        "secure_channel": referral.is_secure,
    })
}

fn ana_json(info: &ListenerInfo) -> Value {
    let groups = info.groups.iter().map(|group| {
        let namespaces = group.namespaces.iter().map(|nsid| nsid.0);
        json!({
            "ana_group": group.id,
            "ana_state": ana_state_name(group.state).replace('-', "_"),
            "namespaces": namespaces.collect::<Vec<_>>(),
        })
    });
    json!({ "address": listener_json(&info.listener), "ana_states": groups.collect::<Vec<_>>() })
}

fn subsystem_json(info: &SubsystemInfo, listeners: &[Listener]) -> Value {
    let hosts = info.hosts.iter().map(|host| {
        json!({
            "nqn": host.nqn.as_str(),
            "secret": host.secret,
            "psk": host.psk,
            "queues": host.queues,
            "iops": host.iops,
            "bandwidth": host.bandwidth,
        })
    });
    json!({
        "nqn": info.nqn.as_str(),
        "subtype": "NVMe",
        "listen_addresses": listeners.iter().map(listener_json).collect::<Vec<_>>(),
        "allow_any_host": info.other_hosts == OtherHosts::Any,
        "other_hosts": info.other_hosts,
        "secret": info.secret_file,
        "psk": info.psk_file,
        "hosts": hosts.collect::<Vec<_>>(),
        "serial_number": info.serial,
        "counts": counts_json(&info.counts),
        "min_cntlid": info.cntlids.start(),
        "max_cntlid": info.cntlids.end(),
        "namespaces": info.namespaces.iter().map(namespace_json).collect::<Vec<_>>(),
    })
}

/// Returns a byte ledger as an object of links, each an object of classes.
pub fn ledger_json(entries: &Entries) -> Value {
    let mut json = json!({});
    for (link, class, bytes) in entries.iter() {
        json[link.name()][class.name()] = bytes.into();
    }
    json
}

fn counts_json(counts: &HealthLog) -> Value {
    json!({
        "reads": counts.reads,
        "read_bytes": counts.read_bytes,
        "writes": counts.writes,
        "written_bytes": counts.written_bytes,
        "media_errors": counts.media_errors,
    })
}

fn controller_json(info: &ControllerInfo) -> Value {
    let mut json = counts_json(&info.counts);
    json["cntlid"] = info.cntlid.into();
    json["hostnqn"] = info.host.as_str().into();
    json["hostid"] = identity::uuid_text(&info.host_id.0).into();
    json["num_io_qpairs"] = info.queues.into();
    json
}

fn namespace_json(info: &NamespaceInfo) -> Value {
    let mut json = json!({
        "nsid": info.nsid.0,
        "name": info.storage.to_string(),
        "uuid": identity::uuid_text(&info.uuid),
        "bytes": info.bytes,
        "block_bytes": info.block_bytes,
        "read_only": info.read_only,
        "ana_group": info.ana_group,
    });
    if let Some((mode, direct, copied)) = info.p2p {
        json["p2p"] = json!({ "mode": mode.name(), "direct": direct, "copied": copied });
    }
    if let Some(counters) = &info.offload {
        let named = counters
            .iter()
            .map(|(counter, value)| (counter.name().to_owned(), Value::from(*value)));
        json["offload"] = Value::Object(named.collect());
    }
    json
}

/// A socket for requests, as long as this lives.
#[derive(Debug)]
pub struct RpcSocket {
    path: PathBuf,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RpcSocket {
    /// Returns the path of the socket of a target that serves a subsystem, unless its user chooses another one: in the user's folder for what runs.
    ///
    /// # Errors
    /// There is no such folder.
    pub fn default_path(nqn: &Nqn) -> io::Result<PathBuf> {
        // The name of a subsystem may have slashes, and is too long for a socket's.
        let name = identity::short_name(nqn);
        Ok(runtime_folder()?.join(format!("{PREFIX}{name}{SUFFIX}")))
    }

    /// Listens at a path, which its user alone may reach, and serves requests on threads.
    ///
    /// # Errors
    /// The path is no place for a socket, or another process listens there ([`io::ErrorKind::AddrInUse`]).
    pub fn listen(path: &Path, control: Arc<Control>) -> io::Result<RpcSocket> {
        let address = SocketAddrUnix::new(path)?;
        let socket = identity::unix_socket()?;
        // A socket has its mode from the beginning: nobody else connects in between.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        if bind(&socket, &address).is_err() {
            match UnixStream::connect(path) {
                Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
                // Left by a process that was killed. What is no socket refuses connections too.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    if !path.symlink_metadata()?.file_type().is_socket() {
                        return Err(io::Error::other("it is there, and is no socket"));
                    }
                    std::fs::remove_file(path)?;
                }
                Err(_) => {}
            }
            bind(&socket, &address)?;
        }
        listen(&socket, CONNECTIONS_MAX as i32)?;
        let (listener, ends) = (UnixListener::from(socket), Arc::new(AtomicBool::new(false)));
        let is_over = ends.clone();
        let thread = rdmux_verbs::thread::spawn("nvmf-rpc", move || serve(&listener, &control, &is_over))?;
        Ok(RpcSocket {
            path: path.to_owned(),
            ends,
            thread: Some(thread),
        })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RpcSocket {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // Ends the thread's wait.
        let woken = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

const PREFIX: &str = "nvme-";
const SUFFIX: &str = ".sock";

fn serve(listener: &UnixListener, control: &Arc<Control>, ends: &AtomicBool) {
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        if ends.load(Ordering::Acquire) {
            return;
        }
        let Ok(stream) = stream else {
            // No descriptor is left, and nothing tells when one is: without a pause the listener would be asked without end.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if !is_trusted(&stream) || open.load(Ordering::Acquire) >= CONNECTIONS_MAX {
            continue;
        }
        open.fetch_add(1, Ordering::AcqRel);
        let (control, counted) = (control.clone(), open.clone());
        let served = rdmux_verbs::thread::spawn("nvmf-rpc", move || {
            let _ = serve_one(stream, &control);
            counted.fetch_sub(1, Ordering::AcqRel);
        });
        if served.is_err() {
            open.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Returns true if the peer is of this process's user, or root.
fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid();
    sockopt::socket_peercred(stream).is_ok_and(|peer| peer.uid == own || peer.uid.is_root())
}

fn serve_one(mut stream: UnixStream, control: &Control) -> io::Result<()> {
    stream.set_read_timeout(Some(IDLE))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let mut received = Vec::new();
    loop {
        let request = match receive(&mut stream, &mut received) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let response = failed(&Value::Null, (code::PARSE, error.to_string()));
                return stream.write_all(format!("{response}\n").as_bytes());
            }
            Err(error) => return Err(error),
        };
        if let Some(response) = respond(control, &request) {
            stream.write_all(format!("{response}\n").as_bytes())?;
        }
    }
}

/// Receives a value of JSON; `None` at the end of the stream.
fn receive(stream: &mut UnixStream, received: &mut Vec<u8>) -> io::Result<Option<Value>> {
    let mut part = [0; 4096];
    loop {
        let mut values = serde_json::Deserializer::from_slice(received).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => {
                let end = values.byte_offset();
                received.drain(..end);
                return Ok(Some(value));
            }
            Some(Err(error)) if !error.is_eof() => return Err(io::ErrorKind::InvalidData.into()),
            _ if received.len() >= REQUEST_MAX => return Err(io::ErrorKind::InvalidData.into()),
            Some(Err(_)) | None => {}
        }
        let bytes = stream.read(&mut part)?;
        if bytes == 0 {
            return Ok(None);
        }
        received.extend_from_slice(&part[..bytes]);
    }
}
