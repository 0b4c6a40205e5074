//! A subsystem that is exported, and its change.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rdmux_drive::KernelController;
use rdmux_wire::nvme::{Nqn, NsId};

use super::config::{NamespaceConfig, OtherHosts, Storage, SubsystemConfig};
use super::{ControlError, NamespaceInfo, SubsystemInfo, drives};
use crate::accelerator::Accelerator;
use crate::auth::Secrets;
use crate::backend::drive::{DriveBackend, DriveSettings};
use crate::backend::{Backend, MemoryBackend, NullBackend, OpenError};
use crate::identity;
use crate::passthrough::{ControllerConfig, PassedController};
use crate::reservations::ReservationFolder;
use crate::server::Listen;
use crate::target::{
    AnaRule, Authentication, CNTLID_MAX, Hosts, Listener, Medium, NAMESPACES_MAX, Namespace, NamespaceError,
    Rates, SharedNamespace, Subsystem, Target, Terms,
};
use crate::tls::psk::Psk;

/// A subsystem, with the description that it follows.
#[derive(Debug)]
pub(super) struct Exported {
    pub(super) subsystem: Arc<Subsystem>,
    pub(super) config: SubsystemConfig,
    pub(super) access: Access,
    pub(super) namespaces: BTreeMap<NsId, NamespaceConfig>,
    /// The highest id that it has had: hosts could take another namespace of one that they know for the same.
    highest: NsId,
    /// State that drives of the target have in common.
    drives: DriveSettings,
    /// Keeps the name from other targets.
    _claim: OwnedFd,
}

/// The files that hosts need which have none of their own.
#[derive(Clone, Debug, Default)]
pub(super) struct Access {
    secret: Option<CommonSecret>,
    psk_file: Option<PathBuf>,
}

/// The secret of hosts that have none of their own.
#[derive(Clone, Debug)]
pub(super) struct CommonSecret {
    file: PathBuf,
    authentication: Authentication,
}

/// A subsystem that stays, with what becomes other.
pub(super) struct Update {
    config: SubsystemConfig,
    hosts: Hosts,
    access: Access,
    /// Namespaces that are new.
    opened: Vec<(SharedNamespace, NamespaceConfig)>,
    /// Those that stay, with their groups.
    kept: Vec<(NsId, u32)>,
}

impl Exported {
    pub(super) fn new(
        mut config: SubsystemConfig,
        tls: bool,
        drives: &DriveSettings,
    ) -> Result<(Nqn, Exported), ControlError> {
        let nqn = config.nqn.clone().unwrap_or_else(identity::default_nqn);
        let cntlids = config.cntlids.clone().unwrap_or(1..=CNTLID_MAX);
        let claim = identity::claim(&nqn, &cntlids).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => ControlError::Claimed(nqn.clone()),
            _ => ControlError::Claim(nqn.clone(), error),
        })?;
        let (hosts, access) = hosts(&config, tls)?;
        let drive = config.controller.as_ref().map(open_controller).transpose()?;
        let serial = drive.as_ref().map(|drive| drive.serial().to_owned());
        let serial = serial.unwrap_or_else(|| identity::serial(&nqn));
        let subsystem = Subsystem::new(nqn.clone(), &serial, hosts);
        let [low, high, ..] = rdmux_key::random_nonce().map_err(ControlError::Random)?;
        let subsystem = subsystem.with_cntlids(cntlids);
        let mut subsystem = subsystem.with_first_cntlid(u16::from_le_bytes([low, high]));
        let mut known = BTreeMap::new();
        if let (Some(drive), Some(ControllerConfig { path, .. })) = (drive, &config.controller) {
            subsystem = subsystem.with_drive(drive);
            known.extend(subsystem.list().iter().map(|namespace| {
                let (nsid, block_shift) = (namespace.nsid, namespace.block_shift);
                (
                    nsid,
                    NamespaceConfig::of_controller(path.clone(), nsid, block_shift),
                )
            }));
        // Without a folder hosts are told that reservations end with the target.
        } else if let Some(folder) = rdmux_key::config_path("nvme-reservations") {
            subsystem = subsystem.with_reservations(Arc::new(ReservationFolder::new(folder)));
        }
        let namespaces = std::mem::take(&mut config.namespaces);
        let mut exported = Exported {
            subsystem: Arc::new(subsystem),
            config,
            access,
            namespaces: known,
            highest: NsId(0),
            drives: drives.clone(),
            _claim: claim,
        };
        for (nsid, namespace) in numbered(namespaces, &BTreeMap::new()) {
            exported.add_namespace(nsid, namespace)?;
        }
        Ok((nqn, exported))
    }

    /// Checks that its namespaces are not those of a drive's controller.
    pub(super) fn check_own_namespaces(&self) -> Result<(), ControlError> {
        match &self.config.controller {
            None => Ok(()),
            Some(controller) => Err(ControlError::OfController {
                nqn: self.subsystem.nqn().clone(),
                controller: controller.clone(),
            }),
        }
    }

    /// Opens all that a namespace needs.
    fn open(&self, nsid: NsId, config: &NamespaceConfig) -> Result<SharedNamespace, ControlError> {
        let file = match &config.storage {
            Storage::File(path) => Some(path.canonicalize().map_err(|source| OpenError::Open {
                path: path.clone(),
                source,
            })?),
            _ => None,
        };
        // Another subsystem may have it as well.
        if file
            .as_ref()
            .is_some_and(|file| self.namespace_of(file).is_some())
        {
            return Err(OpenError::InUse(PathBuf::from(config.storage.to_string())).into());
        }
        let (namespace, medium) = open(self.subsystem.nqn(), nsid, config, file.as_deref(), &self.drives)?;
        let is_first = medium.is_none();
        // Namespaces of one file have UUIDs of their own, but the same reservations.
        let storage = match (config.uuid, &file) {
            (None, Some(file)) => identity::file_uuid(file),
            _ => namespace.uuid,
        };
        let namespace = self
            .subsystem
            .prepare_namespace(namespace, config.ana_group, storage, medium)
            .map_err(|error| ControlError::Namespace(config.storage.to_string(), error))?;
        namespace.medium().add_subsystem(&self.subsystem);
        if let Some(file) = file.filter(|_| is_first) {
            drives::add(&file, &namespace);
        }
        Ok(namespace)
    }

    pub(super) fn add_namespace(&mut self, nsid: NsId, config: NamespaceConfig) -> Result<(), ControlError> {
        // A file that is exported already would be said to be in use.
        self.subsystem
            .check_free(nsid)
            .map_err(|error| ControlError::Namespace(config.storage.to_string(), error))?;
        let namespace = self.open(nsid, &config)?;
        self.subsystem
            .add_prepared(namespace)
            .map_err(|error| ControlError::Namespace(config.storage.to_string(), error))?;
        self.namespaces.insert(nsid, config);
        self.highest = self.highest.max(nsid);
        Ok(())
    }

    /// Sets the states of access that its description has, for the listeners with the ports that they got.
    pub(super) fn set_ana_rules(&self, listeners: &[(Listen, Listener)]) -> Result<(), NamespaceError> {
        let actual = |asked| {
            let known = listeners.iter().find(|(known, _)| known.listener == asked);
            known.map_or(asked, |(_, actual)| *actual)
        };
        let rules = self.config.ana.iter().map(|rule| AnaRule {
            at: rule.at.map(actual),
            ..*rule
        });
        self.subsystem.set_ana_rules(&rules.collect::<Vec<_>>())?;
        Ok(())
    }

    /// Returns the id that a description names, or else the next that no namespace has had; when there is none, the lowest that is free.
    pub(super) fn free_id(&self, config: &NamespaceConfig) -> NsId {
        let ids = (self.highest.0 + 1..=NAMESPACES_MAX).chain(1..).map(NsId);
        let mut free = ids.filter(|nsid| !self.namespaces.contains_key(nsid));
        config.nsid.or_else(|| free.next()).unwrap_or(NsId(1))
    }

    /// Returns the namespace that a file is.
    pub(super) fn namespace_of(&self, path: &Path) -> Option<NsId> {
        let path = path.canonicalize().ok()?;
        let is_same = |config: &NamespaceConfig| match &config.storage {
            Storage::File(known) => known.canonicalize().is_ok_and(|known| known == path),
            Storage::Memory(_)
            | Storage::Null(_)
            | Storage::Accelerator(_)
            | Storage::Pcie(_)
            | Storage::Controller(_) => false,
        };
        let mut namespaces = self.namespaces.iter();
        namespaces.find_map(|(nsid, config)| is_same(config).then_some(*nsid))
    }

    /// Returns true if hosts may come by TLS, or may have come by it: these stay when the last such listener goes.
    pub(super) fn needs_keys(&self, tls: bool) -> bool {
        tls || (self.config.psk.is_none() && self.access.psk_file.is_some())
    }

    /// Opens all that another description of it needs.
    pub(super) fn prepare(&self, mut config: SubsystemConfig, tls: bool) -> Result<Update, ControlError> {
        let nqn = self.subsystem.nqn();
        if config.cntlids != self.config.cntlids {
            return Err(ControlError::Cntlids(nqn.clone()));
        }
        if config.controller != self.config.controller {
            return Err(ControlError::OtherController(nqn.clone()));
        }
        let (hosts, access) = hosts(&config, self.needs_keys(tls))?;
        let (mut opened, mut kept) = (Vec::new(), Vec::new());
        if config.controller.is_some() {
            let namespaces = self.namespaces.iter();
            kept.extend(namespaces.map(|(nsid, known)| (*nsid, known.ana_group)));
        }
        for (nsid, namespace) in numbered(std::mem::take(&mut config.namespaces), &self.namespaces) {
            match self.namespaces.get(&nsid) {
                Some(known) if known.is_same(&namespace) => kept.push((nsid, namespace.ana_group)),
                Some(known) => {
                    let what = if known.storage != namespace.storage {
                        "its storage"
                    } else if known.block_shift != namespace.block_shift {
                        "its blocks"
                    } else if known.uuid != namespace.uuid {
                        "its UUID"
                    } else {
                        "whether it takes writes"
                    };
                    return Err(ControlError::Changes(nsid, nqn.clone(), what));
                }
                None => opened.push((self.open(nsid, &namespace)?, namespace)),
            }
        }
        Ok(Update {
            config,
            hosts,
            access,
            opened,
            kept,
        })
    }

    /// Follows what was prepared, which does not fail.
    pub(super) fn apply(
        &mut self,
        update: Update,
        target: &Target,
        listeners: &[(Listen, Listener)],
    ) -> Result<(), ControlError> {
        // Whatever comes after this, a host that is off the list has no access.
        target.set_hosts(self.subsystem.nqn(), update.hosts)?;
        (self.config, self.access) = (update.config, update.access);
        // Before namespaces come into their groups.
        self.set_ana_rules(listeners)?;
        let is_kept = |nsid: &NsId| update.kept.iter().any(|(kept, _)| kept == nsid);
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
        for (nsid, group) in update.kept {
            self.subsystem.set_ana_group(nsid, group)?;
            // A file that is too short now keeps the size that hosts know: their reads of what is lost fail.
            let _ = self.subsystem.resize_namespace(nsid);
        }
        for (namespace, config) in update.opened {
            let nsid = namespace.nsid;
            self.subsystem.add_prepared(namespace)?;
            self.namespaces.insert(nsid, config);
            self.highest = self.highest.max(nsid);
        }
        Ok(())
    }

    pub(super) fn info(&self) -> SubsystemInfo {
        let namespaces = self.subsystem.list();
        let described = namespaces.iter().filter_map(|namespace| {
            let config = self.namespaces.get(&namespace.nsid)?;
            Some(NamespaceInfo {
                nsid: namespace.nsid,
                bytes: namespace.blocks() << namespace.block_shift,
                block_bytes: 1 << namespace.block_shift,
                uuid: namespace.uuid,
                read_only: namespace.is_protected,
                ana_group: namespace.ana_group(),
                p2p: namespace.backend.peer().map(|drive| {
                    let peers = drive.peers();
                    (drive.p2p(), peers.direct(), peers.copied())
                }),
                offload: namespace
                    .backend
                    .peer()
                    .and_then(DriveBackend::offload)
                    .map(|counts| counts.iter().collect()),
                storage: config.storage.clone(),
            })
        });
        let common = self.access.secret.as_ref();
        SubsystemInfo {
            nqn: self.subsystem.nqn().clone(),
            serial: self.subsystem.serial().to_owned(),
            cntlids: self.subsystem.cntlids(),
            other_hosts: self.config.other_hosts,
            secret_file: common.map(|common| common.file.clone()),
            psk_file: self.access.psk_file.clone(),
            hosts: self.config.hosts.clone(),
            namespaces: described.collect(),
            counts: self.subsystem.counts(),
        }
    }
}

impl NamespaceConfig {
    /// Returns true if it describes the same namespace, whatever its id and its group.
    fn is_same(&self, other: &NamespaceConfig) -> bool {
        let without_id = |config: &NamespaceConfig| NamespaceConfig {
            nsid: None,
            ana_group: 1,
            ..config.clone()
        };
        without_id(self) == without_id(other)
    }
}

/// Gives ids to those that have none: that of a known namespace which is described in the same way, or else the lowest that is free.
fn numbered(
    namespaces: Vec<NamespaceConfig>,
    known: &BTreeMap<NsId, NamespaceConfig>,
) -> Vec<(NsId, NamespaceConfig)> {
    let mut taken: Vec<NsId> = namespaces.iter().filter_map(|namespace| namespace.nsid).collect();
    let same = |namespace: &NamespaceConfig, taken: &[NsId]| {
        let mut same = known.iter().filter(|(_, known)| known.is_same(namespace));
        same.find(|(nsid, _)| !taken.contains(nsid))
            .map(|(nsid, _)| *nsid)
    };
    let mut ids = Vec::new();
    for namespace in &namespaces {
        let nsid = namespace.nsid.or_else(|| same(namespace, &taken));
        taken.extend(nsid);
        ids.push(nsid);
    }
    let mut free = (1..)
        .map(NsId)
        .filter(|nsid| !taken.contains(nsid) && !known.contains_key(nsid));
    let numbered = ids.into_iter().zip(namespaces);
    numbered
        .filter_map(|(nsid, namespace)| Some((nsid.or_else(|| free.next())?, namespace)))
        .collect()
}

/// Returns the hosts of a description, and the files of those that have none of their own, if there are such. With TLS all need keys.
pub(super) fn hosts(config: &SubsystemConfig, tls: bool) -> Result<(Hosts, Access), ControlError> {
    let authentication = |secrets| Authentication {
        secrets,
        random: || rdmux_key::random_nonce().ok(),
    };
    let load = |path: &Path| Ok::<_, ControlError>(authentication(Secrets::load(path)?));
    let needs_own = match config.other_hosts {
        OtherHosts::Secret => true,
        OtherHosts::Any => false,
        OtherHosts::None => config.hosts.iter().any(|host| host.secret.is_none()),
    };
    let common = match &config.secret {
        Some(path) => Some(CommonSecret {
            file: path.clone(),
            authentication: load(path)?,
        }),
        None if needs_own => {
            let file = rdmux_key::config_path("nvme-secret").ok_or(ControlError::NoFolder)?;
            Some(CommonSecret {
                authentication: authentication(Secrets::load_or_create(&file)?),
                file,
            })
        }
        None => None,
    };
    let needs_psk = match config.other_hosts {
        OtherHosts::Secret | OtherHosts::Any => true,
        OtherHosts::None => config.hosts.iter().any(|host| host.psk.is_none()),
    };
    let (psk, psk_file) = match &config.psk {
        Some(path) => (Some(Psk::load(path)?), Some(path.clone())),
        None if tls && needs_psk => {
            let file = rdmux_key::config_path("nvme-psk").ok_or(ControlError::NoFolder)?;
            (Some(Psk::load_or_create(&file)?), Some(file))
        }
        None => (None, None),
    };
    let with_secret = Terms {
        authentication: common.as_ref().map(|common| common.authentication.clone()),
        psk: psk.clone(),
        concat: true,
        ..Terms::default()
    };
    let mut named = BTreeMap::new();
    for host in &config.hosts {
        let own = host.secret.as_deref().map(load).transpose()?;
        let own_psk = host.psk.as_deref().map(Psk::load).transpose()?;
        let terms = Terms {
            // With the secret that others have, they would do without the key that is this one's own.
            concat: own.is_some() || own_psk.is_none(),
            authentication: own.or_else(|| with_secret.authentication.clone()),
            psk: own_psk.or_else(|| psk.clone()),
            queues: host.queues,
            rates: Rates {
                ios: host.iops,
                bytes: host.bandwidth,
            },
        };
        named.insert(host.nqn.clone(), terms);
    }
    let others = match config.other_hosts {
        OtherHosts::Secret => Some(with_secret),
        OtherHosts::Any => Some(Terms {
            psk,
            ..Terms::default()
        }),
        OtherHosts::None => None,
    };
    let access = Access {
        secret: common,
        psk_file,
    };
    Ok((Hosts { others, named }, access))
}

/// Opens a drive's controller, with all of its namespaces.
fn open_controller(config: &ControllerConfig) -> Result<PassedController, ControlError> {
    let controller = KernelController::open(&config.path)?;
    let (namespaces, data_max): (Vec<_>, _) = (controller.namespaces().collect(), controller.data_max());
    let passed = PassedController::new(Arc::new(controller), namespaces, data_max, config.allow);
    passed.map_err(|error| ControlError::Passthrough {
        path: config.path.clone(),
        error,
    })
}

/// Opens the storage of a namespace; `file` is its path, if it is a file. The second value is what it shares with another subsystem.
fn open(
    nqn: &Nqn,
    nsid: NsId,
    config: &NamespaceConfig,
    file: Option<&Path>,
    common: &DriveSettings,
) -> Result<(Namespace, Option<Arc<Medium>>), ControlError> {
    let (mut medium, mut block_shift) = (None, config.block_shift);
    // A host knows a namespace again by its UUID: the same after a restart if the blocks are.
    let (backend, storage): (Arc<dyn Backend>, Vec<u8>) = match &config.storage {
        Storage::File(path) => {
            let path = file.unwrap_or(path);
            let (backend, shared) = drives::open(path, config)?;
            medium = shared;
            (backend, path.as_os_str().as_encoded_bytes().to_vec())
        }
        Storage::Memory(bytes) => {
            let memory = MemoryBackend::new(*bytes);
            let memory = memory.map_err(|error| ControlError::Memory(*bytes, error))?;
            let name = rdmux_key::random_nonce().map_err(ControlError::Random)?;
            (Arc::new(memory), name.to_vec())
        }
        Storage::Null(bytes) => (Arc::new(NullBackend(*bytes)), b"null".to_vec()),
        Storage::Pcie(pcie) => {
            let settings = DriveSettings {
                buffers: pcie.buffers,
                p2p: pcie.p2p,
                ..common.clone()
            };
            let drive = DriveBackend::open(&pcie.place, pcie.unbind, settings)?;
            // It reads and writes no smaller blocks than its own.
            block_shift = block_shift.max(drive.block_shift());
            let name = drive.name().as_bytes().to_vec();
            (Arc::new(drive), name)
        }
        Storage::Accelerator(config) => {
            let name = config.info.algorithm.name().as_bytes().to_vec();
            (Arc::new(Accelerator::new(config.info, config.hosts_max)), name)
        }
        // It comes with its controller.
        Storage::Controller(path) => return Err(OpenError::InUse(path.clone()).into()),
    };
    let uuid = config.uuid;
    let namespace = Namespace {
        nsid,
        block_shift,
        backend,
        uuid: uuid.unwrap_or_else(|| identity::namespace_uuid(nqn, nsid, &storage)),
        is_protected: config.read_only,
    };
    Ok((namespace, medium))
}

#[cfg(test)]
mod tests {
    use super::super::Control;
    use super::super::config::TargetConfig;
    use crate::identity;

    const INSIDE: &str = "RDMUX_TEST_RESERVATIONS";

    #[test]
    fn open__keeps_reservations_of_a_file_under_its_path_whatever_subsystem_is_first() {
        let test = std::thread::current().name().unwrap().to_owned();
        if std::env::var_os(INSIDE).is_none() {
            // A process of its own has another folder of configuration.
            let folder = tempfile::tempdir().unwrap();
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            let command = command.args([&test, "--exact"]);
            let command = command.env(INSIDE, "1").env("XDG_CONFIG_HOME", folder.path());
            let output = command.output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let folder = rdmux_key::config_path("nvme-reservations").unwrap();
        std::fs::create_dir_all(&folder).unwrap();
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let path = disk.path().canonicalize().unwrap();
        let start = |order: [&str; 2]| {
            let described = order.map(|name| {
                format!(
                    "[[subsystem]]\nnqn = \"nqn.2014-08.org.example:kept-{name}\"\nother_hosts = \"any\"\n\
                     [[subsystem.namespace]]\npath = {path:?}\n"
                )
            });
            let text = format!("listen = [\"tcp:127.0.0.1:0\"]\n{}", described.concat());
            Control::start(TargetConfig::parse(&text).unwrap()).unwrap()
        };
        let (control, server) = start(["a", "b"]);
        let uuids: Vec<_> = control
            .subsystems()
            .iter()
            .map(|info| info.namespaces[0].uuid)
            .collect();
        drop((control, server));
        let kept = "rdmux reservations 1\ngeneration 7\nend\n";
        let own = identity::uuid_text(&identity::file_uuid(&path));
        for uuid in uuids {
            // As an earlier version has kept it.
            std::fs::write(folder.join(identity::uuid_text(&uuid)), kept).unwrap();
            for order in [["a", "b"], ["b", "a"]] {
                drop(start(order));
                let files = std::fs::read_dir(&folder).unwrap();
                let names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
                assert_eq!(names, [own.as_str()]);
                assert_eq!(std::fs::read_to_string(folder.join(&own)).unwrap(), kept);
            }
            std::fs::remove_file(folder.join(&own)).unwrap();
        }
    }
}
