//! The options that the commands of the initiator have in common: the target's place, and the host's name and secret.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rdmux_nvmf::auth::{AuthError, SecretError, Secrets};
use rdmux_nvmf::control::config::parse_nqn;
use rdmux_nvmf::host::{Controller, HostError, Loss, NamespaceInfo, Options, Session, Transport, Url};
use rdmux_nvmf::identity;
use rdmux_nvmf::tls::psk::Psk;
use rdmux_wire::nvme::{HostId, Nqn, NsId, Status};
use rdmux_wire::nvme_tcp::Digests;

use crate::cmd::device::DeviceArgs;
use crate::output;

/// Options of each command.
#[derive(clap::Args, Debug)]
pub(super) struct HostArgs {
    /// File with the secret that the target asks for, and in its second line the one that the target has to prove [default: your own, which
    /// `rdmux nvme target` has made, if the target asks for one].
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
    /// Connect by TLS 1.3.
    #[arg(long)]
    tls: bool,
    /// File with the key of TLS, as `nvme gen-tls-key` prints it [default: your own, which `rdmux nvme target --tls` has made].
    #[arg(long, value_name = "FILE", requires = "tls")]
    psk: Option<PathBuf>,
    /// Connect by TLS 1.3 with a key on which host and target agree by their secrets (secure channel concatenation).
    #[arg(long, conflicts_with = "tls")]
    concat: bool,
    /// Protect the headers of what is sent by TCP with CRC-32C.
    #[arg(long)]
    header_digest: bool,
    /// Protect the data by TCP with CRC-32C.
    #[arg(long)]
    data_digest: bool,
    /// Name of this host [default: one of this host and user, the same each time].
    #[arg(long, value_name = "NQN", value_parser = parse_nqn)]
    hostnqn: Option<Nqn>,
    /// Identifier of this host [default: that of the default name].
    #[arg(long, value_name = "UUID", value_parser = parse_hostid)]
    hostid: Option<HostId>,
    /// Local address of RDMA [default: the source address of the route to the target].
    #[arg(long, value_name = "ADDR")]
    from: Option<IpAddr>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Options of the commands that read and write.
#[derive(clap::Args, Debug)]
pub(super) struct IoArgs {
    /// Number of the namespace.
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_nsid)]
    pub(super) nsid: NsId,
    #[command(flatten)]
    session: SessionArgs,
}

/// Options of a session.
#[derive(clap::Args, Debug)]
pub(in crate::cmd) struct SessionArgs {
    /// Another way to the same subsystem, as the URL, whose /NQN it may leave out; may be repeated. I/O goes by the best way that there is, and by another
    /// one when that is lost.
    #[arg(long, value_name = "URL")]
    path: Vec<Url>,
    /// When the target is lost, try for so many seconds to connect again; what was not done is repeated.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = clap::value_parser!(u32).range(0..=86400))]
    ctrl_loss_tmo: u32,
    #[command(flatten)]
    host: HostArgs,
}

fn parse_hostid(text: &str) -> Result<HostId, String> {
    let uuid = identity::parse_uuid(text).filter(|uuid| *uuid != [0; 16]);
    uuid.map(HostId).ok_or_else(|| format!("'{text}' is no UUID"))
}

pub(in crate::cmd) fn parse_nsid(text: &str) -> Result<NsId, String> {
    let nsid = text.parse().ok().filter(|nsid| (1..u32::MAX - 1).contains(nsid));
    nsid.map(NsId)
        .ok_or_else(|| format!("'{text}' is no namespace id: they begin at 1"))
}

/// Returns advice for a command that a target has refused: empty, or what goes behind the status.
pub(super) fn hint(status: Status) -> &'static str {
    match status.is(Status::INVALID_NAMESPACE) {
        true => ": was the namespace removed? `rdmux nvme list URL` shows those that are there",
        false => "",
    }
}

impl HostArgs {
    /// Returns the settings towards a subsystem of a target.
    pub(super) fn options(&self, url: &Url, subsystem: &Nqn) -> Result<Options> {
        let rdma = url.transport == Transport::Rdma;
        if rdma && (self.header_digest || self.data_digest) {
            bail!("{url}: digests are for nvme+tcp://: RDMA checks each packet itself");
        }
        if !rdma && self.from.is_some() {
            bail!("{url}: --from is for nvme+rdma://");
        }
        if rdma && (self.tls || self.concat) {
            bail!("{url}: --tls and --concat are for nvme+tcp://");
        }
        self.device.apply()?;
        let addresses = url.resolve().with_context(|| url.host.clone())?;
        let mut options = Options::new(addresses, subsystem.clone());
        (options.transport, options.from) = (url.transport, self.from);
        if let Some(nqn) = &self.hostnqn {
            options.host = nqn.clone();
        }
        options.host_id = self.hostid.unwrap_or(options.host_id);
        if self.concat && options.is_discovery() {
            bail!("{url}: --concat needs a secret, and discovery services have none with anybody: use --tls");
        }
        options.concat = self.concat;
        options.digests.set(Digests::HEADER, self.header_digest);
        options.digests.set(Digests::DATA, self.data_digest);
        (options.secrets, options.requires_authentication) = match &self.secret {
            // Discovery services tell everybody what they have.
            Some(path) => (Some(Secrets::load(path)?), !options.is_discovery()),
            None => (own_secrets()?, false),
        };
        if self.tls {
            let own = || rdmux_key::config_path("nvme-psk");
            let path = self.psk.clone().or_else(own);
            let path = path.context("no folder with a key of TLS: give its file with --psk FILE")?;
            options.psk = Some(Psk::load(&path)?);
        }
        Ok(options)
    }

    /// Returns the settings towards the subsystem that a URL names.
    pub(super) fn options_of(&self, url: &Url) -> Result<Options> {
        let subsystem = url.subsystem.as_ref().with_context(|| {
            format!(
                "{url} names no subsystem: add /NQN; `rdmux nvme discover {url}` lists those that there are"
            )
        })?;
        self.options(url, subsystem)
    }

    /// Connects to a controller that is only asked.
    pub(super) fn ask(&self, url: &Url) -> Result<Controller> {
        let connected = Controller::connect(&Arc::new(self.options_of(url)?), 0);
        connected.map_err(|error| self.explain(error))
    }

    /// Returns the error of a connection; of one that a secret has failed, with its file.
    fn explain(&self, error: HostError) -> anyhow::Error {
        let is_of_secret = matches!(&error, HostError::Authentication(AuthError::Refused(_)));
        let file = self
            .secret
            .clone()
            .or_else(|| rdmux_key::config_path("nvme-secret"));
        match file.filter(|_| is_of_secret) {
            Some(file) => anyhow!(
                "{error}: the secret is that of {}: give the target's with --secret FILE",
                file.display()
            ),
            None => error.into(),
        }
    }
}

/// Returns the secrets that targets of this user have, if there are any.
fn own_secrets() -> Result<Option<Secrets>> {
    let Some(path) = rdmux_key::config_path("nvme-secret") else {
        return Ok(None);
    };
    match Secrets::load(&path) {
        Ok(secrets) => Ok(Some(secrets)),
        Err(SecretError::Missing(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl IoArgs {
    /// Returns true for headers, and for data, if they have digests.
    pub(super) fn digests(&self) -> (bool, bool) {
        (self.session.host.header_digest, self.session.host.data_digest)
    }

    /// Connects to a subsystem by all paths, for so many I/O queues, and looks the namespace up.
    pub(super) fn session(&self, url: &Url, queues: u16) -> Result<(Arc<Session>, NamespaceInfo)> {
        let session = self.session.connect(url, queues)?;
        let namespace = session.open_namespace(self.nsid)?;
        Ok((session, namespace))
    }
}

impl SessionArgs {
    /// Connects to a subsystem by all paths, for so many I/O queues.
    pub(in crate::cmd) fn connect(&self, url: &Url, queues: u16) -> Result<Arc<Session>> {
        let mut paths = vec![self.host.options_of(url)?];
        for path in &self.path {
            let subsystem = path.subsystem.as_ref().unwrap_or(&paths[0].subsystem);
            if *subsystem != paths[0].subsystem {
                bail!("--path {path} names another subsystem than {url}: give ways to the same one");
            }
            paths.push(self.host.options(path, subsystem)?);
        }
        for options in &mut paths {
            options.loss_timeout = Duration::from_secs(self.ctrl_loss_tmo.into());
        }
        let session = Session::connect_by(paths, queues).map_err(|error| self.host.explain(error))?;
        for (at, why) in session.unreachable() {
            let path = at.checked_sub(1).map_or(url, |at| &self.path[at]);
            output::error(&anyhow!(
                "warning: {path} is no path yet, and is tried again: {why}"
            ));
        }
        self.tell_of_losses(&session)?;
        Ok(session)
    }

    /// Has a thread write a line to stderr for each connection that is lost.
    fn tell_of_losses(&self, session: &Session) -> Result<()> {
        let (losses, seconds) = (session.losses(), self.ctrl_loss_tmo);
        let thread = std::thread::Builder::new().name("nvme-losses".into());
        thread.spawn(move || {
            for Loss {
                address,
                cause,
                has_other,
            } in losses
            {
                let next = match has_other {
                    true => "I/O goes by another path".to_owned(),
                    false => format!("tries again for {seconds} s"),
                };
                output::error(&anyhow!("the connection to {address} was lost ({cause}): {next}"));
            }
        })?;
        Ok(())
    }
}
