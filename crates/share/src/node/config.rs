//! The configuration of a node: its device's rate and its tenants, from a TOML file. docs/node.md has the keys.
//!
//! [`Config::parse`] is pure. It reports everything that is wrong with a file, not the first error alone, each as one line ([`Finding`]).

mod read;
#[cfg(test)]
mod tests;

use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};

use rdmux_rnic::sched::Entitlement;
use rdmux_verbs::provider::user::uid_of_name;

use super::application::{QPS_MAX, REGIONS_MAX, WORK_REQUESTS_ALL_MAX};

/// Name of the tenant of whoever matches no other one.
pub const DEFAULT_TENANT: &str = "default";
/// Most tenants of a node.
pub const TENANTS_MAX: usize = 1024;
/// Percent of a tenant's bytes that its strict classes may take while lower ones wait, unless the file says otherwise.
pub const STRICT_PERCENT_DEFAULT: u8 = 90;

/// Configuration of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file that it is from.
    pub file: PathBuf,
    /// Bits per second that the device sends at most; `None`: as many as it can.
    pub rate_bps: Option<u64>,
    /// Percent of a tenant's bytes that its strict classes may take while its lower ones wait, 1 to 100.
    pub strict_percent: u8,
    /// Tenants, in the order of the file.
    pub tenants: Vec<Tenant>,
    /// Treatment of processes that match no tenant.
    pub others: Others,
}

/// A tenant of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Users whose processes belong to it.
    pub users: Vec<User>,
    /// Control groups whose processes belong to it: absolute paths, without a slash at the end.
    pub cgroups: Vec<String>,
    /// Its part of the device, and its limits.
    pub settings: Settings,
}

/// A user of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The number.
    pub uid: u32,
    /// The name, if the file has the name.
    pub name: Option<String>,
}

/// Treatment of processes that match no tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Others {
    /// Those of the node's own user are in the default tenant, others are refused: the file has no `[default]`.
    OwnUser,
    /// They are refused.
    Refused,
    /// They are in the default tenant.
    Served(Settings),
}

/// Part of the device and limits of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Its part of the device.
    pub entitlement: Entitlement,
    /// How much its applications may have, together.
    pub limits: Limits,
}

/// Resources whose number a tenant's configuration limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumIter, strum::EnumCount, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Resource {
    /// Processes that have the device open, each time that they have.
    Applications,
    /// Queue pairs.
    QueuePairs,
    /// Requests that the queues of all queue pairs can hold.
    Requests,
    /// Memory regions.
    Regions,
    /// Bytes in memory regions; those of memory in two regions count twice.
    Bytes,
}

impl Resource {
    /// Returns the key of the file.
    pub fn key(self) -> &'static str {
        self.into()
    }

    /// Returns how much each application may have at most, whatever its tenant; `None`: any number.
    pub fn most_of_each(self) -> Option<u64> {
        match self {
            Resource::Applications | Resource::Bytes => None,
            Resource::QueuePairs => Some(QPS_MAX as u64),
            Resource::Requests => Some(WORK_REQUESTS_ALL_MAX.into()),
            Resource::Regions => Some(REGIONS_MAX as u64),
        }
    }

    /// Returns the name for people.
    pub fn name(self) -> &'static str {
        match self {
            Resource::Applications => "applications",
            Resource::QueuePairs => "queue pairs",
            Resource::Requests => "requests in its queue pairs",
            Resource::Regions => "memory regions",
            Resource::Bytes => "bytes in memory regions",
        }
    }
}

/// Limits of a tenant, for all its applications together. `None`: those of each application, and [`Config::served_tenants`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits([Option<u64>; <Resource as strum::EnumCount>::COUNT]);

impl Limits {
    /// Returns the limit of a resource.
    pub fn get(&self, resource: Resource) -> Option<u64> {
        self.0[resource as usize]
    }

    /// Sets the limit of a resource.
    pub fn set(&mut self, resource: Resource, limit: Option<u64>) {
        self.0[resource as usize] = limit;
    }
}

/// One line about a file: what is wrong, or doubtful, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The file.
    pub file: PathBuf,
    /// Line, from 1 on.
    pub line: usize,
    /// The error or doubt, and the remedy.
    pub text: String,
}

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.text)
    }
}

/// Why a file is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {error}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// Its contents are wrong: the errors in the order of lines, at least one.
    #[error("{}", summary(.0))]
    Wrong(Vec<Finding>),
}

fn summary(errors: &[Finding]) -> String {
    match errors {
        [] => "the file is wrong".into(),
        [error] => error.to_string(),
        [first, rest @ ..] => {
            let file = first.file.display();
            let count = rest.len();
            format!("{first} ({count} more: `rdmux node check {file}` lists them)")
        }
    }
}

/// Tenant of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// The tenant of this index in [`Config::tenants`].
    Tenant(usize),
    /// The default tenant.
    Default,
    /// None: the process is refused.
    Refused,
}

impl Config {
    /// Reads a file; returns also the warnings.
    ///
    /// # Errors
    /// The file cannot be read, or is wrong.
    pub fn read(file: &Path) -> Result<(Config, Vec<Finding>), ConfigError> {
        let text = std::fs::read_to_string(file).map_err(|error| ConfigError::Read {
            file: file.to_owned(),
            error,
        })?;
        Config::parse(file, &text, &uid_of_name)
    }

    /// Parses the text of a file; returns also the warnings. `uid_of_name` returns the uid of a user's name.
    ///
    /// # Errors
    /// [`ConfigError::Wrong`].
    pub fn parse(
        file: &Path,
        text: &str,
        uid_of_name: &dyn Fn(&str) -> io::Result<Option<u32>>,
    ) -> Result<(Config, Vec<Finding>), ConfigError> {
        read::parse(file, text, uid_of_name)
    }

    /// Returns the tenant of a process: that of the most specific control group, else that of the user, else the default. `uid`: its user,
    /// `None` if it may be any of several; `cgroup`: its control group; `own`: the user of the node.
    pub fn assign(&self, uid: Option<u32>, cgroup: Option<&str>, own: u32) -> Assignment {
        let by_cgroup = cgroup.and_then(|cgroup| {
            let matches = self.tenants.iter().enumerate().flat_map(|(at, tenant)| {
                let depths = tenant
                    .cgroups
                    .iter()
                    .filter_map(|prefix| depth_below(cgroup, prefix));
                depths.map(move |depth| (depth, at))
            });
            matches.max_by_key(|(depth, _)| *depth).map(|(_, at)| at)
        });
        let by_uid = || {
            let has = |tenant: &Tenant| tenant.users.iter().any(|user| Some(user.uid) == uid);
            self.tenants.iter().position(has)
        };
        match (by_cgroup.or_else(by_uid), &self.others) {
            (Some(at), _) => Assignment::Tenant(at),
            (None, Others::Served(_)) => Assignment::Default,
            (None, Others::OwnUser) if uid == Some(own) => Assignment::Default,
            (None, Others::OwnUser | Others::Refused) => Assignment::Refused,
        }
    }

    /// Returns whether tenants have control groups.
    pub fn has_cgroups(&self) -> bool {
        self.tenants.iter().any(|tenant| !tenant.cgroups.is_empty())
    }

    /// Returns the number of tenants, with the default one if it may have applications. One without a limit may have an equal part of the
    /// node's applications, queue pairs and memory regions.
    pub fn served_tenants(&self) -> usize {
        let has_default = !matches!(self.others, Others::Refused);
        self.tenants.len() + usize::from(has_default)
    }

    /// Returns whether a node of the user `own` serves other users too: then it is a node for the host, and not one for its user.
    pub fn serves_others(&self, own: u32) -> bool {
        let is_other = |user: &User| user.uid != own;
        let others = self
            .tenants
            .iter()
            .any(|tenant| tenant.users.iter().any(is_other));
        others || self.has_cgroups() || matches!(self.others, Others::Served(_))
    }

    /// Returns the settings of the default tenant.
    pub fn default_settings(&self) -> Settings {
        match &self.others {
            Others::Served(settings) => *settings,
            Others::OwnUser | Others::Refused => Settings::default(),
        }
    }
}

/// Returns the number of components of `prefix`, if `path` is that control group or one below it.
fn depth_below(path: &str, prefix: &str) -> Option<usize> {
    let parts = |path: &'_ str| path.split('/').filter(|part| !part.is_empty()).count();
    let prefix = prefix.trim_end_matches('/');
    let rest = path.strip_prefix(prefix)?;
    (rest.is_empty() || rest.starts_with('/')).then(|| parts(prefix))
}

/// Writes a rate as people do: `25 Gbit/s`.
pub fn rate_text(bps: u64) -> String {
    const UNITS: [(u64, &str); 4] = [
        (1_000_000_000_000, "Tbit"),
        (1_000_000_000, "Gbit"),
        (1_000_000, "Mbit"),
        (1_000, "kbit"),
    ];
    let (factor, unit) = UNITS
        .into_iter()
        .find(|(factor, _)| bps >= *factor)
        .unwrap_or((1, "bit"));
    format!("{} {unit}/s", bps as f64 / factor as f64)
}
