//! A target as its user describes it ([`config`]), its start, and changes of it while it runs, also by requests of other
//! processes ([`rpc`]).
//!
//! A change is prepared as a whole before anything of it is done: files are opened, secrets read and addresses listened on. So one that fails
//! changes nothing.

pub mod config;
pub mod rpc;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_wire::nvme::{Nqn, NsId};

use self::config::{HostConfig, NamespaceConfig, Storage, SubsystemConfig, TargetConfig};
use crate::auth::{SecretError, Secrets};
use crate::backend::{Backend, FileBackend, MemoryBackend, NullBackend, OpenError};
use crate::identity;
use crate::reservations::ReservationFolder;
use crate::server::{Config, Handle, ServeError, Server};
use crate::target::{
    Authentication, Hosts, Listener, Namespace, NamespaceError, Subsystem, Target, TargetError, Terms,
};

/// Reason for which a target was not started or changed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// It has no such subsystem.
    #[error(transparent)]
    Subsystem(#[from] TargetError),
    /// It has several subsystems, and the request names none.
    #[error("the target has several subsystems: name one of {0}")]
    Several(String),
    /// Another target of this host has that name.
    #[error("another target of this host serves {0}: end it, or choose another name")]
    Claimed(Nqn),
    /// The name could not be claimed.
    #[error("cannot claim {0}: {1}")]
    Claim(Nqn, io::Error),
    /// A file is no storage.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is not so much memory.
    #[error("cannot have {0} bytes of memory: {1}")]
    Memory(u64, io::Error),
    /// A namespace cannot be so.
    #[error("cannot export {0}: {1}")]
    Namespace(String, NamespaceError),
    /// A namespace changes into what it cannot become at once.
    #[error("namespace {0} of {1} changes {2}: remove it first, and add it again then")]
    Changes(NsId, Nqn, &'static str),
    /// There is no such namespace, or it cannot be measured.
    #[error(transparent)]
    Id(#[from] NamespaceError),
    /// A secret cannot be read.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// There is no folder for the user's own secret.
    #[error("no folder for the secret: set HOME or XDG_CONFIG_HOME, or name a file with a secret")]
    NoFolder,
    /// A subsystem has a secret for every host, and lets every host in without one.
    #[error("{0} has a secret and lets any host in without it: give one of both")]
    Contradiction(Nqn),
    /// Two subsystems have the same name.
    #[error("two subsystems have the name {0}")]
    Twice(Nqn),
    /// A host is not in the list.
    #[error("{1} has no host {0} in its list")]
    Host(Nqn, Nqn),
    /// An address is not free.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// It does not listen there.
    #[error("the target does not listen on {0}")]
    Listener(Listener),
    /// A number that only a start sets.
    #[error("the number of reactors changes only with a restart")]
    Reactors,
    /// The system has no random bytes.
    #[error("no random bytes: {0}")]
    Random(io::Error),
}

/// A target that runs, or is about to.
#[derive(Debug)]
pub struct Control {
    target: Arc<Target>,
    handle: Handle,
    reactors: u16,
    subsystems: Mutex<BTreeMap<Nqn, Exported>>,
}

/// A subsystem, with the description that it follows.
#[derive(Debug)]
struct Exported {
    subsystem: Arc<Subsystem>,
    config: SubsystemConfig,
    secret_file: Option<PathBuf>,
    namespaces: BTreeMap<NsId, NamespaceConfig>,
    /// Keeps the name from other targets.
    _claim: OwnedFd,
}

/// A subsystem, to be shown.
#[derive(Clone, Debug)]
pub struct SubsystemInfo {
    /// Its name.
    pub nqn: Nqn,
    /// Its serial number.
    pub serial: String,
    /// Every host may use it, without a secret.
    pub allows_any_host: bool,
    /// The file with the secret of hosts that have none of their own.
    pub secret_file: Option<PathBuf>,
    /// That file has a secret of the target too.
    pub has_controller_secret: bool,
    /// Hosts on terms of their own.
    pub hosts: Vec<HostConfig>,
    /// Its namespaces, in the order of their ids.
    pub namespaces: Vec<NamespaceInfo>,
}

/// A namespace, to be shown.
#[derive(Clone, Debug)]
pub struct NamespaceInfo {
    /// Its id.
    pub nsid: NsId,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// It takes no writes.
    pub read_only: bool,
    /// What stores its blocks.
    pub storage: Storage,
}

impl Control {
    /// Makes a target, and the server for it, which listens.
    ///
    /// # Errors
    /// Something in the description is not there, or in use.
    pub fn start(config: TargetConfig) -> Result<(Control, Server), ControlError> {
        let target = Arc::new(Target::default());
        let mut subsystems = BTreeMap::new();
        for subsystem in named(config.subsystems)? {
            let (nqn, exported) = Exported::new(subsystem)?;
            target.add_subsystem(exported.subsystem.clone())?;
            subsystems.insert(nqn, exported);
        }
        let server = Server::bind(Config {
            target: target.clone(),
            listen: config.listen,
            reactors: config.reactors.into(),
            waiting: None,
        })?;
        let control = Control {
            target,
            handle: server.handle(),
            reactors: config.reactors,
            subsystems: Mutex::new(subsystems),
        };
        Ok((control, server))
    }

    /// Returns the ways to it.
    pub fn listeners(&self) -> Vec<Listener> {
        self.target.listeners()
    }

    /// Returns its subsystems, in the order of their names.
    pub fn subsystems(&self) -> Vec<SubsystemInfo> {
        self.subsystems.lock().values().map(Exported::info).collect()
    }

    /// Adds a namespace to a subsystem, and returns its id. A target with one subsystem needs no name.
    ///
    /// # Errors
    /// There is no such subsystem, the id is taken, or the storage is not there or in use.
    pub fn add_namespace(&self, nqn: Option<&Nqn>, config: NamespaceConfig) -> Result<NsId, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        let nsid = exported.free_id(&config);
        exported.add_namespace(nsid, config)?;
        self.handle.tell_of_change();
        Ok(nsid)
    }

    /// Removes a namespace. Commands that have been admitted are carried out.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn remove_namespace(&self, nqn: Option<&Nqn>, nsid: NsId) -> Result<(), ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        exported.subsystem.remove_namespace(nsid)?;
        exported.namespaces.remove(&nsid);
        self.handle.tell_of_change();
        Ok(())
    }

    /// Has a namespace take the size that its file has now. Returns true if it is another one.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, or the file has not even one block.
    pub fn resize_namespace(&self, nqn: Option<&Nqn>, nsid: NsId) -> Result<bool, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let is_resized = find(&mut subsystems, nqn)?.subsystem.resize_namespace(nsid)?;
        self.handle.tell_of_change();
        Ok(is_resized)
    }

    /// Lets a host in, or changes its terms.
    ///
    /// # Errors
    /// There is no such subsystem, or its secret cannot be read.
    pub fn add_host(&self, nqn: Option<&Nqn>, host: HostConfig) -> Result<(), ControlError> {
        self.change_hosts(nqn, |config, _| {
            config.hosts.retain(|known| known.nqn != host.nqn);
            config.hosts.push(host);
            Ok(())
        })
    }

    /// Takes a host off the list. Its controllers end, unless every host may use the subsystem on the same terms.
    ///
    /// # Errors
    /// There is no such subsystem, or the host is not in its list.
    pub fn remove_host(&self, nqn: Option<&Nqn>, host: &Nqn) -> Result<(), ControlError> {
        self.change_hosts(nqn, |config, nqn| {
            let number = config.hosts.len();
            config.hosts.retain(|known| known.nqn != *host);
            match config.hosts.len() < number {
                true => Ok(()),
                false => Err(ControlError::Host(host.clone(), nqn.clone())),
            }
        })
    }

    /// Lets every host in without a secret, or no more.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn allow_any_host(&self, nqn: Option<&Nqn>, allows: bool) -> Result<(), ControlError> {
        self.change_hosts(nqn, |config, _| {
            config.allow_any_host = allows;
            Ok(())
        })
    }

    fn change_hosts(
        &self,
        nqn: Option<&Nqn>,
        change: impl FnOnce(&mut SubsystemConfig, &Nqn) -> Result<(), ControlError>,
    ) -> Result<(), ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        let nqn = exported.subsystem.nqn().clone();
        let mut config = exported.config.clone();
        change(&mut config, &nqn)?;
        let (hosts, secret_file) = hosts(&config, &nqn)?;
        self.target.set_hosts(&nqn, hosts)?;
        (exported.config, exported.secret_file) = (config, secret_file);
        self.handle.tell_of_change();
        Ok(())
    }

    /// Listens on another address of TCP. Returns the listener, with its port.
    ///
    /// # Errors
    /// The address is not free, or the transport is another one.
    pub fn add_listener(&self, listener: Listener) -> Result<Listener, ControlError> {
        let listener = self.handle.listen(listener)?;
        self.target.add_listener(listener);
        self.handle.tell_of_change();
        Ok(listener)
    }

    /// Listens no more on an address of TCP. Hosts that have come by it stay.
    ///
    /// # Errors
    /// The target does not listen there.
    pub fn remove_listener(&self, listener: &Listener) -> Result<(), ControlError> {
        if !self.handle.stop_listening(listener) {
            return Err(ControlError::Listener(*listener));
        }
        self.target.remove_listener(listener);
        self.handle.tell_of_change();
        Ok(())
    }

    /// Follows another description: what is the same stays as it is, files are measured again. What was changed by single requests since the start
    /// is given up.
    ///
    /// # Errors
    /// Something is not there, in use, or cannot change while the target runs; then nothing has changed.
    pub fn reload(&self, config: TargetConfig) -> Result<(), ControlError> {
        if config.reactors != self.reactors {
            return Err(ControlError::Reactors);
        }
        let mut subsystems = self.subsystems.lock();
        let described = named(config.subsystems)?;
        let mut prepared = Vec::new();
        for config in described {
            let nqn = config.nqn.clone().unwrap_or_else(identity::default_nqn);
            prepared.push(match subsystems.get(&nqn) {
                Some(exported) => Change::Update(nqn, exported.prepare(config)?),
                None => Change::Add(Exported::new(config)?),
            });
        }
        let known = self.target.listeners();
        let mut added = Vec::new();
        for listener in config.listen.iter().filter(|listener| !known.contains(listener)) {
            match self.handle.listen(*listener) {
                Ok(listener) => added.push(listener),
                Err(error) => {
                    for listener in &added {
                        self.handle.stop_listening(listener);
                    }
                    return Err(error.into());
                }
            }
        }
        // Nothing fails from here on.
        let mut stays: Vec<Nqn> = Vec::new();
        for change in prepared {
            match change {
                Change::Add((nqn, exported)) => {
                    self.target.add_subsystem(exported.subsystem.clone())?;
                    stays.push(nqn.clone());
                    subsystems.insert(nqn, exported);
                }
                Change::Update(nqn, update) => {
                    if let Some(exported) = subsystems.get_mut(&nqn) {
                        exported.apply(update, &self.target)?;
                    }
                    stays.push(nqn);
                }
            }
        }
        let gone: Vec<Nqn> = subsystems
            .keys()
            .filter(|nqn| !stays.contains(nqn))
            .cloned()
            .collect();
        for nqn in gone {
            self.target.remove_subsystem(&nqn)?;
            subsystems.remove(&nqn);
        }
        for listener in &added {
            self.target.add_listener(*listener);
        }
        for listener in known.iter().filter(|listener| !config.listen.contains(listener)) {
            if self.handle.stop_listening(listener) {
                self.target.remove_listener(listener);
            }
        }
        self.handle.tell_of_change();
        Ok(())
    }
}

/// A subsystem of another description, of which all is there.
enum Change {
    Add((Nqn, Exported)),
    Update(Nqn, Update),
}

/// A subsystem that stays, with what becomes other.
struct Update {
    config: SubsystemConfig,
    hosts: Hosts,
    secret_file: Option<PathBuf>,
    /// Namespaces that are new or have another storage.
    opened: Vec<(Namespace, NamespaceConfig)>,
    /// Those that stay.
    kept: Vec<NsId>,
}

impl Exported {
    fn new(mut config: SubsystemConfig) -> Result<(Nqn, Exported), ControlError> {
        let nqn = config.nqn.clone().unwrap_or_else(identity::default_nqn);
        let claim = identity::claim(&nqn).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => ControlError::Claimed(nqn.clone()),
            _ => ControlError::Claim(nqn.clone(), error),
        })?;
        let (hosts, secret_file) = hosts(&config, &nqn)?;
        let mut subsystem = Subsystem::new(nqn.clone(), &identity::serial(&nqn), hosts);
        // Without a folder hosts are told that reservations end with the target.
        if let Some(folder) = rdmux_key::config_path("nvme-reservations") {
            subsystem = subsystem.with_reservations(Arc::new(ReservationFolder::new(folder)));
        }
        let namespaces = std::mem::take(&mut config.namespaces);
        let mut exported = Exported {
            subsystem: Arc::new(subsystem),
            config,
            secret_file,
            namespaces: BTreeMap::new(),
            _claim: claim,
        };
        for (nsid, namespace) in numbered(namespaces) {
            exported.add_namespace(nsid, namespace)?;
        }
        Ok((nqn, exported))
    }

    fn add_namespace(&mut self, nsid: NsId, config: NamespaceConfig) -> Result<(), ControlError> {
        // A file that is exported already would be said to be in use.
        self.subsystem
            .check_free(nsid)
            .map_err(|error| ControlError::Namespace(config.storage.to_string(), error))?;
        let namespace = open(self.subsystem.nqn(), nsid, &config)?;
        self.subsystem
            .add_namespace(namespace)
            .map_err(|error| ControlError::Namespace(config.storage.to_string(), error))?;
        self.namespaces.insert(nsid, config);
        Ok(())
    }

    /// Returns the id that a description names, or else the lowest that is free.
    fn free_id(&self, config: &NamespaceConfig) -> NsId {
        let mut free = (1..).map(NsId).filter(|nsid| !self.namespaces.contains_key(nsid));
        config.nsid.or_else(|| free.next()).unwrap_or(NsId(1))
    }

    /// Opens all that another description of it needs.
    fn prepare(&self, mut config: SubsystemConfig) -> Result<Update, ControlError> {
        let nqn = self.subsystem.nqn();
        let (hosts, secret_file) = hosts(&config, nqn)?;
        let (mut opened, mut kept) = (Vec::new(), Vec::new());
        for (nsid, namespace) in numbered(std::mem::take(&mut config.namespaces)) {
            match self.namespaces.get(&nsid) {
                Some(known) if known.is_same(&namespace) => kept.push(nsid),
                Some(known) if known.storage == namespace.storage => {
                    let what = match known.block_shift == namespace.block_shift {
                        true if known.uuid == namespace.uuid => "whether it takes writes",
                        true => "its UUID",
                        false => "its blocks",
                    };
                    return Err(ControlError::Changes(nsid, nqn.clone(), what));
                }
                _ => {
                    let failed = |error| ControlError::Namespace(namespace.storage.to_string(), error);
                    let backend = open(nqn, nsid, &namespace)?;
                    backend.check().map_err(failed)?;
                    opened.push((backend, namespace));
                }
            }
        }
        Ok(Update {
            config,
            hosts,
            secret_file,
            opened,
            kept,
        })
    }

    fn apply(&mut self, update: Update, target: &Target) -> Result<(), ControlError> {
        let is_kept = |nsid: &NsId| update.kept.contains(nsid);
        let gone: Vec<NsId> = self
            .namespaces
            .keys()
            .filter(|nsid| !is_kept(nsid))
            .copied()
            .collect();
        for nsid in gone {
            self.subsystem.remove_namespace(nsid)?;
            self.namespaces.remove(&nsid);
        }
        for nsid in update.kept {
            // A file that is too short now keeps the size that hosts know: their reads of what is lost fail.
            let _ = self.subsystem.resize_namespace(nsid);
        }
        for (namespace, config) in update.opened {
            let nsid = namespace.nsid;
            self.subsystem.add_namespace(namespace)?;
            self.namespaces.insert(nsid, config);
        }
        target.set_hosts(self.subsystem.nqn(), update.hosts)?;
        (self.config, self.secret_file) = (update.config, update.secret_file);
        Ok(())
    }

    fn info(&self) -> SubsystemInfo {
        let namespaces = self.subsystem.list();
        let described = namespaces.iter().filter_map(|namespace| {
            let config = self.namespaces.get(&namespace.nsid)?;
            Some(NamespaceInfo {
                nsid: namespace.nsid,
                bytes: namespace.blocks() << namespace.block_shift,
                block_bytes: 1 << namespace.block_shift,
                uuid: namespace.uuid,
                read_only: namespace.is_protected,
                storage: config.storage.clone(),
            })
        });
        let hosts = self.subsystem.hosts();
        let authentications = hosts.others.iter().chain(hosts.named.values());
        SubsystemInfo {
            nqn: self.subsystem.nqn().clone(),
            serial: self.subsystem.serial().to_owned(),
            allows_any_host: self.config.allow_any_host,
            secret_file: self.secret_file.clone(),
            has_controller_secret: authentications
                .filter_map(|terms| terms.authentication.as_ref())
                .any(|authentication| authentication.secrets.controller.is_some()),
            hosts: self.config.hosts.clone(),
            namespaces: described.collect(),
        }
    }
}

impl NamespaceConfig {
    /// Returns true if it describes the same namespace, whatever its id.
    fn is_same(&self, other: &NamespaceConfig) -> bool {
        let without_id = |config: &NamespaceConfig| NamespaceConfig {
            nsid: None,
            ..config.clone()
        };
        without_id(self) == without_id(other)
    }
}

/// Gives ids to those that have none: the lowest that are free, in their order. Of two with the same id the last one is refused when it is added.
fn numbered(namespaces: Vec<NamespaceConfig>) -> Vec<(NsId, NamespaceConfig)> {
    let taken: Vec<NsId> = namespaces.iter().filter_map(|namespace| namespace.nsid).collect();
    let mut free = (1..).map(NsId).filter(|nsid| !taken.contains(nsid));
    namespaces
        .into_iter()
        .filter_map(|namespace| Some((namespace.nsid.or_else(|| free.next())?, namespace)))
        .collect()
}

/// Checks that no two subsystems have one name.
fn named(subsystems: Vec<SubsystemConfig>) -> Result<Vec<SubsystemConfig>, ControlError> {
    let mut names: Vec<Nqn> = Vec::new();
    for subsystem in &subsystems {
        let nqn = subsystem.nqn.clone().unwrap_or_else(identity::default_nqn);
        if names.contains(&nqn) {
            return Err(ControlError::Twice(nqn));
        }
        names.push(nqn);
    }
    Ok(subsystems)
}

fn find<'a>(
    subsystems: &'a mut MutexGuard<'_, BTreeMap<Nqn, Exported>>,
    nqn: Option<&Nqn>,
) -> Result<&'a mut Exported, ControlError> {
    match nqn {
        Some(nqn) => subsystems
            .get_mut(nqn)
            .ok_or_else(|| TargetError::Missing(nqn.clone()).into()),
        None if subsystems.len() > 1 => {
            let names: Vec<_> = subsystems.keys().map(Nqn::as_str).collect();
            Err(ControlError::Several(names.join(", ")))
        }
        None => {
            let only = subsystems.values_mut().next();
            only.ok_or_else(|| TargetError::Missing(identity::default_nqn()).into())
        }
    }
}

/// Returns the hosts of a description, and the file of the secret of those that have none of their own.
fn hosts(config: &SubsystemConfig, nqn: &Nqn) -> Result<(Hosts, Option<PathBuf>), ControlError> {
    let authentication = |secrets| Authentication {
        secrets,
        random: || rdmux_key::random_nonce().ok(),
    };
    let load = |path: &Path| Ok::<_, ControlError>(authentication(Secrets::load(path)?));
    let (common, file) = match (&config.secret, config.allow_any_host) {
        (Some(_), true) => return Err(ControlError::Contradiction(nqn.clone())),
        (None, true) => (None, None),
        (Some(path), false) => (Some(load(path)?), Some(path.clone())),
        (None, false) if config.hosts.iter().any(|host| host.secret.is_none()) || config.hosts.is_empty() => {
            let path = rdmux_key::config_path("nvme-secret").ok_or(ControlError::NoFolder)?;
            (Some(authentication(Secrets::load_or_create(&path)?)), Some(path))
        }
        (None, false) => (None, None),
    };
    let terms = |authentication, queues| Terms {
        authentication,
        queues,
    };
    let mut hosts = Hosts::default();
    if config.allow_any_host || config.secret.is_some() || config.hosts.is_empty() {
        hosts.others = Some(terms(common.clone(), None));
    }
    for host in &config.hosts {
        let own = host.secret.as_deref().map(load).transpose()?;
        let terms = terms(own.or_else(|| common.clone()), host.queues);
        hosts.named.insert(host.nqn.clone(), terms);
    }
    Ok((hosts, file))
}

fn open(nqn: &Nqn, nsid: NsId, config: &NamespaceConfig) -> Result<Namespace, ControlError> {
    let backend: Arc<dyn Backend> = match &config.storage {
        Storage::File(path) => Arc::new(FileBackend::open(
            path,
            config.read_only,
            1 << config.block_shift,
        )?),
        Storage::Memory(bytes) => {
            let memory = MemoryBackend::new(*bytes);
            Arc::new(memory.map_err(|error| ControlError::Memory(*bytes, error))?)
        }
        Storage::Null(bytes) => Arc::new(NullBackend(*bytes)),
    };
    // A host knows a namespace again by its UUID: the same after a restart if the blocks are.
    let storage = match &config.storage {
        Storage::File(path) => {
            let path = path.canonicalize().map_err(|source| OpenError::Open {
                path: path.clone(),
                source,
            })?;
            path.into_os_string().into_encoded_bytes()
        }
        Storage::Memory(_) => rdmux_key::random_nonce().map_err(ControlError::Random)?.to_vec(),
        Storage::Null(_) => b"null".to_vec(),
    };
    let uuid = config.uuid;
    Ok(Namespace {
        nsid,
        block_shift: config.block_shift,
        backend,
        uuid: uuid.unwrap_or_else(|| identity::namespace_uuid(nqn, nsid, &storage)),
        is_protected: config.read_only,
    })
}
