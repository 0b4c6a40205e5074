//! A target as its user describes it ([`config`]), its start, and changes of it while it runs, also by requests of other
//! processes ([`rpc`]).
//!
//! A change is prepared as a whole before anything of it is done: files are opened, secrets read and addresses listened on. So one that fails
//! changes nothing.

pub mod config;
mod drives;
mod exported;
pub mod rpc;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use rdmux_drive::KernelOpenError;
use rdmux_verbs::ledger::{Entries, Ledger};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_wire::nvme::{AnaGroup, DISCOVERY_NQN, HealthLog, Nqn, NsId};

use self::config::{
    HostConfig, NamespaceConfig, OtherHosts, PcieStorage, Storage, SubsystemConfig, TargetConfig,
};
use self::exported::{Exported, Update, hosts};
use crate::announce::{Announcer, is_announced};
use crate::auth::SecretError;
use crate::backend::OpenError;
use crate::backend::drive::{DriveBackendError, DriveSettings};
use crate::backend::offload::OffloadCounter;
use crate::backend::peer::PeerToPeer;
use crate::identity;
use crate::passthrough::{ControllerConfig, PassthroughError};
use crate::server::{Config, Handle, Listen, ServeError, Server};
use crate::target::{AnaRule, ControllerInfo, Listener, NamespaceError, Referral, Target, TargetError};
use crate::tls::psk::PskError;

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
    #[error(
        "another target of this host serves {0}: end it, choose another name, or split the ids of controllers (--cntlids)"
    )]
    Claimed(Nqn),
    /// The ids that only a start sets.
    #[error("the ids of controllers of {0} change only with a restart")]
    Cntlids(Nqn),
    /// The name could not be claimed.
    #[error("cannot claim {0}: {1}")]
    Claim(Nqn, io::Error),
    /// A file is no storage.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A drive cannot be driven.
    #[error(transparent)]
    Drive(#[from] DriveBackendError),
    /// A drive's controller cannot be opened.
    #[error(transparent)]
    Controller(#[from] KernelOpenError),
    /// Namespaces of a drive's controller cannot be exported.
    #[error("cannot export {}: {error}", path.display())]
    Passthrough {
        /// The controller.
        path: PathBuf,
        /// The cause.
        error: PassthroughError,
    },
    /// A subsystem has a drive's controller, whose namespaces are all that it has.
    #[error(
        "the namespaces of {nqn} are those of the drive {controller}: they are not added, removed or resized one by one"
    )]
    OfController {
        /// The subsystem.
        nqn: Nqn,
        /// The controller.
        controller: ControllerConfig,
    },
    /// The controller that only a start sets.
    #[error("the controller of {0} changes only with a restart")]
    OtherController(Nqn),
    /// A file is a namespace of this target.
    #[error("{} is namespace {nsid} of {nqn} already", path.display())]
    IsNamespace {
        /// The file.
        path: PathBuf,
        /// The namespace.
        nsid: NsId,
        /// Its subsystem.
        nqn: Nqn,
    },
    /// A namespace has no file that could have another size.
    #[error(
        "namespace {0} is {1}, which keeps the size that it was made with: remove it, and add one of another size"
    )]
    NoFile(NsId, Storage),
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
    /// A key of TLS cannot be read.
    #[error(transparent)]
    Psk(#[from] PskError),
    /// There is no folder for the user's own secret.
    #[error("no folder for the secret: set HOME or XDG_CONFIG_HOME, or name a file with a secret")]
    NoFolder,
    /// Two subsystems have the same name.
    #[error("two subsystems have the name {0}")]
    Twice(Nqn),
    /// A host is not in the list.
    #[error("{1} has no host {0} in its list")]
    Host(Nqn, Nqn),
    /// An address is not free.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// It listens there already.
    #[error("this target listens on {0} already")]
    Listens(Listener),
    /// It does not listen there.
    #[error("the target does not listen on {0}")]
    Listener(Listener),
    /// A number that only a start sets.
    #[error("the number of reactors changes only with a restart")]
    Reactors,
    /// A setting of the start.
    #[error("whether the target keeps a byte ledger changes only with a restart")]
    Ledger,
    /// A setting of the start.
    #[error("whether the target has an offload engine changes only with a restart")]
    Offload,
    /// Two listeners have the same address.
    #[error("two listeners are for {0}")]
    ListenTwice(Listener),
    /// Hosts are not referred there.
    #[error("the target refers no host to {0}")]
    NoReferral(Referral),
    /// Two referrals are to the same service.
    #[error("two referrals are to {0}")]
    ReferralTwice(Referral),
    /// Two namespaces have the same id.
    #[error("two namespaces of {1} have the id {0}")]
    SameId(NsId, Nqn),
    /// The name is not free for a user's subsystem.
    #[error("{0} is the name of the discovery service: choose another one")]
    Discovery(Nqn),
    /// Its discovery service cannot be announced.
    #[error("cannot announce the target by mDNS: {0}")]
    Announce(#[from] mdns_sd::Error),
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
    /// The listeners as they were asked for, and with the port that they got.
    listeners: Mutex<Vec<(Listen, Listener)>>,
    subsystems: Mutex<BTreeMap<Nqn, Exported>>,
    /// State that the drives have in common which the target drives itself.
    drives: DriveSettings,
    /// Announces listeners by mDNS, where that is asked for.
    announcer: Mutex<Option<Announcer>>,
}

/// A subsystem, to be shown.
#[derive(Clone, Debug)]
pub struct SubsystemInfo {
    /// Its name.
    pub nqn: Nqn,
    /// Its serial number.
    pub serial: String,
    /// Ids of its controllers.
    pub cntlids: RangeInclusive<u16>,
    /// Hosts that are not among [`SubsystemInfo::hosts`].
    pub other_hosts: OtherHosts,
    /// The file with the secret of hosts that have none of their own.
    pub secret_file: Option<PathBuf>,
    /// The file with the key of TLS of hosts that have none of their own.
    pub psk_file: Option<PathBuf>,
    /// Hosts on terms of their own.
    pub hosts: Vec<HostConfig>,
    /// Its namespaces, in the order of their ids.
    pub namespaces: Vec<NamespaceInfo>,
    /// Number and bytes of what all controllers have carried out, also those that are over.
    pub counts: HealthLog,
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
    /// Its group of those that share a state of access.
    pub ana_group: u32,
    /// Commands whose data its drive takes itself: which, and the number of those that it did, and of those whose data were copied.
    pub p2p: Option<(PeerToPeer, u64, u64)>,
    /// Counters of the offload engine, if it has commands of this namespace.
    pub offload: Option<Vec<(OffloadCounter, u64)>>,
    /// The storage of its blocks.
    pub storage: Storage,
}

/// A listener as the hosts of a subsystem see it.
#[derive(Clone, Debug)]
pub struct ListenerInfo {
    /// The listener.
    pub listener: Listener,
    /// The states of access to its groups of namespaces.
    pub groups: Vec<AnaGroup>,
}

impl Control {
    /// Makes a target, and the server for it, which listens.
    ///
    /// # Errors
    /// Something in the description is not there, or in use.
    pub fn start(config: TargetConfig) -> Result<(Control, Server), ControlError> {
        let ledger = config.ledger.then(Arc::<Ledger>::default);
        let target = match &ledger {
            Some(ledger) => Target::default().with_ledger(ledger.clone()),
            None => Target::default(),
        };
        let target = Arc::new(target);
        let drives = DriveSettings {
            offload: config.offload,
            ledger,
            ..DriveSettings::default()
        };
        let mut subsystems = BTreeMap::new();
        check(&config)?;
        target.set_referrals(config.referrals);
        let tls = config.listen.iter().any(|listen| listen.tls);
        for subsystem in config.subsystems {
            let (nqn, exported) = Exported::new(subsystem, tls, &drives)?;
            target.add_subsystem(exported.subsystem.clone())?;
            subsystems.insert(nqn, exported);
        }
        let server = Server::bind(Config {
            target: target.clone(),
            listen: config.listen.clone(),
            reactors: config.reactors.into(),
            offload: config.offload,
            waiting: None,
        })?;
        let actual = server.listeners().iter().copied();
        let listeners: Vec<_> = config.listen.into_iter().zip(actual).collect();
        // Connections are not served before the server runs.
        for exported in subsystems.values() {
            exported.set_ana_rules(&listeners)?;
        }
        let mut announcer = config.mdns.then(Announcer::new).transpose()?;
        if let Some(announcer) = &mut announcer {
            announcer.set(&target.listeners())?;
        }
        let control = Control {
            target,
            handle: server.handle(),
            reactors: config.reactors,
            listeners: Mutex::new(listeners),
            subsystems: Mutex::new(subsystems),
            drives,
            announcer: Mutex::new(announcer),
        };
        Ok((control, server))
    }

    /// Returns the bytes that RNICs and drives have moved at its side; `None`: it does not count them.
    pub fn ledger(&self) -> Option<Entries> {
        self.target.ledger().map(|ledger| ledger.entries())
    }

    /// Returns the ways to it.
    pub fn listeners(&self) -> Vec<Listener> {
        self.target.listeners()
    }

    /// Returns the ways to it, with their settings.
    pub fn listening(&self) -> Vec<Listen> {
        let listeners = self.listeners.lock();
        let actual = listeners.iter().map(|(asked, listener)| Listen {
            listener: *listener,
            ..*asked
        });
        actual.collect()
    }

    /// Returns its subsystems, in the order of their names.
    pub fn subsystems(&self) -> Vec<SubsystemInfo> {
        self.subsystems.lock().values().map(Exported::info).collect()
    }

    /// Returns the controllers of a subsystem. A target with one subsystem needs no name.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn controllers(&self, nqn: Option<&Nqn>) -> Result<Vec<ControllerInfo>, ControlError> {
        let mut subsystems = self.subsystems.lock();
        Ok(find(&mut subsystems, nqn)?.subsystem.controllers())
    }

    /// Adds a namespace to a subsystem, and returns its id. A target with one subsystem needs no name.
    ///
    /// # Errors
    /// There is no such subsystem, the id is taken, or the storage is not there or in use.
    pub fn add_namespace(&self, nqn: Option<&Nqn>, config: NamespaceConfig) -> Result<NsId, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        exported.check_own_namespaces()?;
        let nsid = exported.free_id(&config);
        match exported.add_namespace(nsid, config) {
            Err(ControlError::Open(OpenError::InUse(path))) => {
                let mut exported = subsystems.iter();
                let known = exported.find_map(|(nqn, one)| Some((nqn.clone(), one.namespace_of(&path)?)));
                Err(match known {
                    Some((nqn, nsid)) => ControlError::IsNamespace { path, nsid, nqn },
                    None => OpenError::InUse(path).into(),
                })
            }
            Err(error) => Err(error),
            Ok(()) => {
                self.handle.tell_of_change();
                Ok(nsid)
            }
        }
    }

    /// Removes a namespace. Commands that have been admitted are carried out.
    ///
    /// # Errors
    /// There is no such subsystem or namespace.
    pub fn remove_namespace(&self, nqn: Option<&Nqn>, nsid: NsId) -> Result<(), ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        exported.check_own_namespaces()?;
        exported.subsystem.remove_namespace(nsid)?;
        let removed = exported.namespaces.remove(&nsid);
        self.handle.tell_of_change();
        drop(subsystems);
        // A drive that no queue uses has shut down then.
        if let Some(Storage::Pcie(pcie)) = removed.map(|config| config.storage) {
            self.drives.endings.wait_for(&pcie.place.address.to_string());
        }
        Ok(())
    }

    /// Has a namespace take the size that its file has now. Returns true if it is another one.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, it has no file, or the file has not even one block.
    pub fn resize_namespace(&self, nqn: Option<&Nqn>, nsid: NsId) -> Result<bool, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        exported.check_own_namespaces()?;
        match exported.namespaces.get(&nsid).map(|known| &known.storage) {
            Some(
                storage @ (Storage::Memory(_)
                | Storage::Null(_)
                | Storage::Accelerator(_)
                | Storage::Pcie(_)
                | Storage::Controller(_)),
            ) => {
                return Err(ControlError::NoFile(nsid, storage.clone()));
            }
            Some(Storage::File(_)) | None => {}
        }
        let is_resized = exported.subsystem.resize_namespace(nsid)?;
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

    /// Takes a host off the list. Its controllers end, unless other hosts may use the subsystem on the same terms.
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

    /// Changes the treatment of hosts that are not in the list.
    ///
    /// # Errors
    /// There is no such subsystem, or the secret cannot be read.
    pub fn set_other_hosts(&self, nqn: Option<&Nqn>, others: OtherHosts) -> Result<(), ControlError> {
        self.change_hosts(nqn, |config, _| {
            config.other_hosts = others;
            Ok(())
        })
    }

    /// Returns true if a listener requires TLS.
    fn has_tls(&self) -> bool {
        self.listeners.lock().iter().any(|(asked, _)| asked.tls)
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
        let (hosts, access) = hosts(&config, exported.needs_keys(self.has_tls()))?;
        self.target.set_hosts(&nqn, hosts)?;
        (exported.config, exported.access) = (config, access);
        self.handle.tell_of_change();
        Ok(())
    }

    /// Changes the state of access to namespaces, for hosts that have come by a listener or by any. Returns false if it was so.
    ///
    /// # Errors
    /// There is no such subsystem, it does not listen there, or the group is invalid.
    pub fn set_ana_state(&self, nqn: Option<&Nqn>, rule: AnaRule) -> Result<bool, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let exported = find(&mut subsystems, nqn)?;
        if let Some(listener) = rule.at {
            let listeners = self.listeners.lock();
            if !listeners.iter().any(|(_, actual)| *actual == listener) {
                return Err(ControlError::Listener(listener));
            }
        }
        let is_other = exported.subsystem.set_ana_state(rule)?;
        self.handle.tell_of_change();
        Ok(is_other)
    }

    /// Puts a namespace into another group of those that share a state of access. Returns false if it was in it.
    ///
    /// # Errors
    /// There is no such subsystem or namespace, or the group is invalid.
    pub fn set_ana_group(&self, nqn: Option<&Nqn>, nsid: NsId, group: u32) -> Result<bool, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let is_other = find(&mut subsystems, nqn)?.subsystem.set_ana_group(nsid, group)?;
        self.handle.tell_of_change();
        Ok(is_other)
    }

    /// Returns the listeners with the states of access to the namespaces of a subsystem.
    ///
    /// # Errors
    /// There is no such subsystem.
    pub fn ana(&self, nqn: Option<&Nqn>) -> Result<Vec<ListenerInfo>, ControlError> {
        let mut subsystems = self.subsystems.lock();
        let subsystem = &find(&mut subsystems, nqn)?.subsystem;
        let listeners = self.listeners().into_iter();
        let described = listeners.map(|listener| ListenerInfo {
            listener,
            groups: subsystem.ana_log(listener).groups,
        });
        Ok(described.collect())
    }

    /// Listens on another address. Returns the listener, with its port.
    ///
    /// # Errors
    /// The address is not free, there is no device with it, or the target listens there already.
    pub fn add_listener(&self, listen: Listen) -> Result<Listener, ControlError> {
        listen.check()?;
        let is_there = |listener: &Listener| *listener == listen.listener;
        if self.listeners().iter().any(is_there) {
            return Err(ControlError::Listens(listen.listener));
        }
        let mut subsystems = self.subsystems.lock();
        let needs_keys = listen.tls && !self.has_tls();
        let mut accesses = Vec::new();
        for exported in subsystems.values().filter(|_| needs_keys) {
            accesses.push(hosts(&exported.config, true)?);
        }
        let mut listeners = self.listeners.lock();
        let actual = self.handle.listen(listen)?;
        for (exported, (hosts, access)) in subsystems.values_mut().zip(accesses) {
            self.target.set_hosts(exported.subsystem.nqn(), hosts)?;
            exported.access = access;
        }
        listeners.push((listen, actual));
        self.target.add_way(actual, listen.tls);
        self.handle.tell_of_change();
        self.announce();
        Ok(actual)
    }

    /// Listens no more on an address. Hosts that have come by it stay, and find the states of access that were set for it; so do those that
    /// come by it when it is added again.
    ///
    /// # Errors
    /// The target does not listen there.
    pub fn remove_listener(&self, listener: &Listener) -> Result<(), ControlError> {
        let mut listeners = self.listeners.lock();
        if !listeners.iter().any(|(_, actual)| actual == listener) {
            return Err(ControlError::Listener(*listener));
        }
        self.handle.stop_listening(listener);
        listeners.retain(|(_, actual)| actual != listener);
        self.target.remove_listener(listener);
        self.handle.tell_of_change();
        self.announce();
        Ok(())
    }

    /// Has mDNS announce what the target listens on, if that is asked for.
    fn announce(&self) {
        if let Some(announcer) = &mut *self.announcer.lock() {
            // Fails where the thread is too busy for more, which the next change makes up for: the listeners work without.
            let _ = announcer.set(&self.target.listeners());
        }
    }

    /// Returns the listeners that mDNS announces: those that other hosts can reach. `None`: it is not asked for.
    pub fn announced(&self) -> Option<Vec<Listener>> {
        let is_asked_for = self.announcer.lock().is_some();
        is_asked_for.then(|| self.listeners().into_iter().filter(is_announced).collect())
    }

    /// Withdraws what mDNS has announced, before the target ends.
    pub fn withdraw(&self) {
        self.announcer.lock().take();
    }

    /// Stops the drives that the target drives itself, once the server has ended, and returns them. Those that were removed before have stopped as well
    /// then.
    pub fn stop_drives(&self) -> Vec<PcieStorage> {
        let mut drives = Vec::new();
        for exported in self.subsystems.lock().values_mut() {
            for (nsid, config) in &exported.namespaces {
                if let Storage::Pcie(pcie) = &config.storage {
                    drives.push(pcie.clone());
                    // It is there as long as its description.
                    let _ = exported.subsystem.remove_namespace(*nsid);
                }
            }
        }
        self.drives.endings.wait_for_all();
        drives
    }

    /// Refers hosts to another discovery service, or on other terms than before. Hosts that have asked for it are told.
    pub fn add_referral(&self, referral: Referral) {
        self.target.add_referral(referral);
        self.handle.tell_of_change();
    }

    /// Refers hosts no more to a discovery service, whatever its terms are.
    ///
    /// # Errors
    /// They are not referred there.
    pub fn remove_referral(&self, referral: Referral) -> Result<(), ControlError> {
        if !self.target.remove_referral(&referral) {
            return Err(ControlError::NoReferral(referral));
        }
        self.handle.tell_of_change();
        Ok(())
    }

    /// Returns the discovery services to which hosts are referred.
    pub fn referrals(&self) -> Vec<Referral> {
        self.target.referrals()
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
        if config.offload != self.drives.offload {
            return Err(ControlError::Offload);
        }
        if config.ledger != self.target.ledger().is_some() {
            return Err(ControlError::Ledger);
        }
        let mut subsystems = self.subsystems.lock();
        check(&config)?;
        let tls = config.listen.iter().any(|listen| listen.tls);
        let mut prepared = Vec::new();
        for config in config.subsystems {
            let nqn = config.nqn.clone().unwrap_or_else(identity::default_nqn);
            prepared.push(match subsystems.get(&nqn) {
                Some(exported) => Change::Update(nqn, exported.prepare(config, tls)?),
                None => Change::Add(Exported::new(config, tls, &self.drives)?),
            });
        }
        let mut listeners = self.listeners.lock();
        let (becomes, new) = pair(&listeners, config.listen);
        let (mut stay, mut leave, mut changed) = (Vec::new(), Vec::new(), Vec::new());
        for ((asked, actual), becomes) in listeners.iter().zip(becomes) {
            let Some(wanted) = becomes else {
                leave.push(*actual);
                continue;
            };
            if wanted != *asked {
                changed.push(self.handle.prepare(Listen {
                    listener: *actual,
                    ..wanted
                })?);
            }
            stay.push((wanted, *actual));
        }
        let mut announcer = self.announcer.lock();
        let new_announcer = match (&*announcer, config.mdns) {
            (None, true) => Some(Announcer::new()?),
            _ => None,
        };
        let mut added = Vec::new();
        for asked in new {
            match self.handle.listen(asked) {
                Ok(actual) => added.push((asked, actual)),
                Err(error) => {
                    for (_, actual) in &added {
                        self.handle.stop_listening(actual);
                    }
                    return Err(error.into());
                }
            }
        }
        // Nothing fails from here on, unless the server has ended.
        for settings in changed {
            self.handle.set(settings)?;
        }
        for (wanted, actual) in &stay {
            self.target.add_way(*actual, wanted.tls);
        }
        *listeners = [stay, added.clone()].concat();
        let mut stays: Vec<Nqn> = Vec::new();
        for change in prepared {
            match change {
                Change::Add((nqn, exported)) => {
                    exported.set_ana_rules(&listeners)?;
                    self.target.add_subsystem(exported.subsystem.clone())?;
                    stays.push(nqn.clone());
                    subsystems.insert(nqn, exported);
                }
                Change::Update(nqn, update) => {
                    if let Some(exported) = subsystems.get_mut(&nqn) {
                        exported.apply(update, &self.target, &listeners)?;
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
        for actual in &leave {
            self.handle.stop_listening(actual);
            self.target.remove_listener(actual);
        }
        for (asked, actual) in &added {
            self.target.add_way(*actual, asked.tls);
        }
        self.target.set_referrals(config.referrals);
        self.handle.tell_of_change();
        *announcer = announcer.take().or(new_announcer).filter(|_| config.mdns);
        drop(announcer);
        self.announce();
        Ok(())
    }
}

/// A subsystem of another description, of which all is there.
enum Change {
    Add((Nqn, Exported)),
    Update(Nqn, Update),
}

/// Pairs each known listener with one of another description: the one with the same settings if there is such, since several may be for one address
/// with port 0. Returns the description of each that stays, and those that are new.
fn pair(known: &[(Listen, Listener)], mut wanted: Vec<Listen>) -> (Vec<Option<Listen>>, Vec<Listen>) {
    let mut becomes = vec![None; known.len()];
    for with_same_settings in [true, false] {
        for ((asked, _), becomes) in known.iter().zip(&mut becomes) {
            let is_its = |wanted: &Listen| match with_same_settings {
                true => wanted == asked,
                false => wanted.listener == asked.listener,
            };
            if becomes.is_none() {
                let at = wanted.iter().position(is_its);
                *becomes = at.map(|at| wanted.remove(at));
            }
        }
    }
    (becomes, wanted)
}

/// Checks that listeners can be served, that no two subsystems have one name, no two namespaces of one an id, that states of access are for addresses on which the target listens,
/// that no two listeners have one address, and that no two referrals are to one service.
fn check(config: &TargetConfig) -> Result<(), ControlError> {
    // Before a key is made for them.
    config.listen.iter().try_for_each(Listen::check)?;
    let mut names: Vec<Nqn> = Vec::new();
    for subsystem in &config.subsystems {
        let nqn = subsystem.nqn.clone().unwrap_or_else(identity::default_nqn);
        if names.contains(&nqn) {
            return Err(ControlError::Twice(nqn));
        }
        if nqn.as_str() == DISCOVERY_NQN {
            return Err(ControlError::Discovery(nqn));
        }
        let mut ids: Vec<NsId> = subsystem
            .namespaces
            .iter()
            .filter_map(|namespace| namespace.nsid)
            .collect();
        ids.sort_unstable();
        if let Some(controller) = subsystem
            .controller
            .as_ref()
            .filter(|_| !subsystem.namespaces.is_empty())
        {
            let controller = controller.clone();
            return Err(ControlError::OfController { nqn, controller });
        }
        if let Some(same) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ControlError::SameId(same[0], nqn));
        }
        let mut ways = subsystem.ana.iter().filter_map(|rule| rule.at);
        let is_there = |at: &Listener| config.listen.iter().any(|listen| listen.listener == *at);
        if let Some(other) = ways.find(|at| !is_there(at)) {
            return Err(ControlError::Listener(other));
        }
        names.push(nqn);
    }
    for (at, Listen { listener, .. }) in config.listen.iter().enumerate() {
        // The system chooses the port instead of 0.
        let is_same = |before: &Listen| before.listener == *listener && listener.address.port() != 0;
        if config.listen[..at].iter().any(is_same) {
            return Err(ControlError::ListenTwice(*listener));
        }
    }
    for (at, referral) in config.referrals.iter().enumerate() {
        if config.referrals[..at].iter().any(|before| before.is_to(referral)) {
            return Err(ControlError::ReferralTwice(referral.clone()));
        }
    }
    Ok(())
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
