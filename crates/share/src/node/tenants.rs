//! The tenants of a node: which process belongs to which, and how much the applications of each have together.
//!
//! An [`Account`] counts what a tenant has. Each object holds the [`Charge`] for it, which ends with the object, so that no way to end leaves
//! anything on an account.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rdmux_rnic::Time;
use rdmux_rnic::sched::{Entitlement, TenantId};
use rdmux_verbs::provider::folder;
use rdmux_wire::node::control::ErrorCode;
use rustix::process::{Resource as RlimitResource, getrlimit};
use strum::{EnumCount, IntoEnumIterator};

use super::APPLICATIONS_MAX;
use super::config::{
    Assignment, Config, DEFAULT_TENANT, Limits, Others, Resource, STRICT_PERCENT_DEFAULT, Settings,
};
use super::division::{Demand, divide};
use super::egress::Egress;
use super::identity::Identity;
use crate::control::convert::Refusal;

/// Limit of a resource that has none.
const UNLIMITED: u64 = u64::MAX;

/// Resources of a node. A tenant without a limit may have an equal part of them, so that it does not take those of others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    pub(super) queue_pairs: u64,
    pub(super) regions: u64,
}

impl Capacity {
    /// Returns that of a node with a device of so many queue pairs. Each region takes a descriptor and a mapping.
    pub(super) fn new(queue_pairs: u64) -> Capacity {
        let descriptors = getrlimit(RlimitResource::Nofile).current.unwrap_or(u64::MAX);
        let mappings = fs::read_to_string("/proc/sys/vm/max_map_count");
        let mappings = mappings.ok().and_then(|text| text.trim().parse().ok());
        let regions = descriptors.min(mappings.unwrap_or(u64::MAX));
        Capacity {
            queue_pairs,
            // Sockets, doorbells, rings and the device need some.
            regions: regions - regions / 4,
        }
    }

    /// Returns how much of a resource there is; `None`: any number.
    fn of(self, resource: Resource) -> Option<u64> {
        match resource {
            Resource::Applications => Some(APPLICATIONS_MAX as u64),
            Resource::QueuePairs => Some(self.queue_pairs),
            Resource::Regions => Some(self.regions),
            Resource::Requests | Resource::Bytes => None,
        }
    }

    /// Returns the limits of one of so many tenants.
    fn part(self, limits: &Limits, tenants: u64) -> Limits {
        let mut all = *limits;
        for resource in Resource::iter() {
            let part = self.of(resource).map(|all| (all / tenants.max(1)).max(1));
            all.set(resource, limits.get(resource).or(part));
        }
        all
    }
}

/// Resources that the applications of a tenant have, and may have.
#[derive(Debug)]
pub(super) struct Account {
    name: String,
    /// The file with its limits; without a configuration there are none.
    file: PathBuf,
    limits: [AtomicU64; Resource::COUNT],
    used: [AtomicU64; Resource::COUNT],
    /// Connections of its processes, and how many they may have: those of applications, and those that only hold the node.
    connections: AtomicU64,
    connections_max: AtomicU64,
    /// For each worker, how many of its queue pairs there have requests that wait: the workers divide its rates by that.
    waiting: Box<[AtomicU32]>,
}

impl Account {
    pub(super) fn new(name: &str, file: PathBuf, limits: (&Limits, u64), workers: usize) -> Arc<Account> {
        let account = Account {
            name: name.to_owned(),
            file,
            limits: Default::default(),
            used: Default::default(),
            connections: AtomicU64::new(0),
            connections_max: AtomicU64::new(0),
            waiting: (0..workers).map(|_| AtomicU32::new(0)).collect(),
        };
        account.set_limits(limits);
        Arc::new(account)
    }

    /// Sets limits of one of so many tenants. What the applications have stays, also beyond them.
    fn set_limits(&self, (limits, tenants): (&Limits, u64)) {
        for resource in Resource::iter() {
            let limit = limits.get(resource).unwrap_or(UNLIMITED);
            self.limits[resource as usize].store(limit, Ordering::Relaxed);
        }
        // `rdmux run --shared` holds the node beside the program's own connection. Holds take nothing from the part of other tenants.
        let applications = self.limit(Resource::Applications);
        let part = APPLICATIONS_MAX as u64 / tenants.max(1);
        let most = applications.max(applications.saturating_mul(2).min(part));
        self.connections_max.store(most, Ordering::Relaxed);
    }

    /// Returns the name of the tenant.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the limit of a resource.
    pub(super) fn limit(&self, resource: Resource) -> u64 {
        self.limits[resource as usize].load(Ordering::Relaxed)
    }

    /// Takes so much of a resource, until the charge is dropped.
    ///
    /// # Errors
    /// The tenant would exceed its limit.
    pub(super) fn charge(self: &Arc<Account>, resource: Resource, amount: u64) -> Result<Charge, Refusal> {
        let limit = self.limit(resource);
        // Without a limit the sum may wrap: nobody compares it with anything.
        let add =
            |used: u64| Some(used.wrapping_add(amount)).filter(|_| used.saturating_add(amount) <= limit);
        match self.used[resource as usize].fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Charge {
                account: self.clone(),
                resource,
                amount,
            }),
            Err(used) => {
                let exceeded = self.exceeded(resource, used, limit);
                Err(Refusal::new(ErrorCode::Limit, exceeded))
            }
        }
    }

    /// Takes a place among the connections of the tenant's processes, until it is dropped.
    ///
    /// # Errors
    /// The tenant has as many as it may have.
    pub(super) fn seat(self: &Arc<Account>) -> Result<Seat, Refusal> {
        let most = self.connections_max.load(Ordering::Relaxed);
        let add = |used: u64| Some(used + 1).filter(|used| *used <= most);
        match self
            .connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
        {
            Ok(_) => Ok(Seat {
                account: self.clone(),
            }),
            Err(_) => {
                let used = self.used[Resource::Applications as usize].load(Ordering::Relaxed);
                let limit = self.limit(Resource::Applications);
                let mut text = self.exceeded(Resource::Applications, used, limit);
                if used < limit {
                    text = format!(
                        "{most} processes of the tenant have or hold the node, as many as may: {text}"
                    );
                }
                Err(Refusal::new(ErrorCode::Limit, text))
            }
        }
    }

    fn exceeded(&self, resource: Resource, used: u64, limit: u64) -> String {
        let (tenant, name, key) = (&self.name, resource.name(), resource.key());
        let section = match tenant.as_str() {
            DEFAULT_TENANT => "[default]".to_owned(),
            tenant => format!("[tenant.{tenant}]"),
        };
        let file = self.file.display();
        format!(
            "the tenant {tenant} has {used} of at most {limit} {name}: raise limits.{key} in {section} of {file}"
        )
    }
}

/// Part of a resource that an account's applications have.
#[derive(Debug)]
pub(super) struct Charge {
    account: Arc<Account>,
    resource: Resource,
    amount: u64,
}

impl Charge {
    /// Moves the charge to another account, also beyond that one's limit.
    pub(super) fn move_to(&mut self, account: &Arc<Account>) {
        account.used[self.resource as usize].fetch_add(self.amount, Ordering::Relaxed);
        *self = Charge {
            account: account.clone(),
            ..*self
        };
    }

    /// Adds another charge of the same account and resource to this one.
    pub(super) fn add(&mut self, mut other: Charge) {
        self.amount += std::mem::take(&mut other.amount);
    }

    /// Gives back what exceeds an amount.
    pub(super) fn lower_to(&mut self, amount: u64) {
        let lower = self.amount.min(amount);
        let back = std::mem::replace(&mut self.amount, lower) - lower;
        self.account.used[self.resource as usize].fetch_sub(back, Ordering::Relaxed);
    }

    /// Returns the amount.
    pub(super) fn amount(&self) -> u64 {
        self.amount
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.used[self.resource as usize].fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// A place among the connections of a tenant's processes.
#[derive(Debug)]
pub(super) struct Seat {
    account: Arc<Account>,
}

impl Seat {
    /// Moves the connection to another account, also beyond that one's limit.
    pub(super) fn move_to(&mut self, account: &Arc<Account>) {
        account.connections.fetch_add(1, Ordering::Relaxed);
        *self = Seat {
            account: account.clone(),
        };
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.account.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The tenants of a node.
#[derive(Debug)]
pub(super) struct Tenants {
    /// `None`: one tenant without limits, the node's own user.
    config: Option<Config>,
    /// Uid of the node.
    own: u32,
    /// Accounts by name, the default one too.
    accounts: HashMap<String, Arc<Account>>,
    capacity: Capacity,
    workers: usize,
}

impl Tenants {
    /// Returns the tenants of a node with so many workers.
    pub(super) fn new(config: Option<Config>, capacity: Capacity, workers: usize) -> Tenants {
        let mut tenants = Tenants {
            config: None,
            own: folder::uid(),
            accounts: HashMap::new(),
            capacity,
            workers,
        };
        match config {
            Some(config) => tenants.set(config),
            None => {
                let limits = (&Limits::default(), 1);
                let default = Account::new(DEFAULT_TENANT, PathBuf::new(), limits, workers);
                tenants.accounts.insert(DEFAULT_TENANT.to_owned(), default);
            }
        }
        tenants
    }

    /// Replaces the configuration. Tenants that remain keep their accounts.
    pub(super) fn set(&mut self, config: Config) {
        let mut accounts = HashMap::new();
        for (name, Settings { limits, .. }) in settings(&config) {
            let tenants = config.served_tenants() as u64;
            let limits = self.capacity.part(&limits, tenants);
            let account = match self.accounts.remove(name) {
                Some(kept) => {
                    kept.set_limits((&limits, tenants));
                    kept
                }
                None => Account::new(name, config.file.clone(), (&limits, tenants), self.workers),
            };
            accounts.insert(name.to_owned(), account);
        }
        self.accounts = accounts;
        self.config = Some(config);
    }

    /// Returns the bits per second that all tenants together do not exceed, if there is a limit.
    pub(super) fn rate_bps(&self) -> Option<u64> {
        self.config.as_ref().and_then(|config| config.rate_bps)
    }

    /// Returns the part of a tenant's bytes that its strict classes may take while its lower ones wait.
    pub(super) fn strict_percent(&self) -> u8 {
        self.config
            .as_ref()
            .map_or(STRICT_PERCENT_DEFAULT, |config| config.strict_percent)
    }

    /// Returns the accounts of the configuration's tenants, and what these are entitled to; none without a configuration.
    fn entitled(&self) -> impl Iterator<Item = (&Arc<Account>, Entitlement)> {
        let all = self.config.iter().flat_map(settings);
        all.filter_map(|(name, settings)| Some((self.accounts.get(name)?, settings.entitlement)))
    }

    /// Returns what a tenant of the configuration is entitled to.
    pub(super) fn entitlement(&self, name: &str) -> Option<Entitlement> {
        let mut all = self.entitled();
        let found = all.find(|(account, _)| account.name() == name);
        found.map(|(_, entitlement)| entitlement)
    }

    /// Returns the names of the tenants.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.accounts.keys().map(String::as_str)
    }

    /// Returns whether an application that has an account keeps it: until its tenant is gone, or is no more for such processes.
    pub(super) fn keeps(&self, account: &Arc<Account>, identity: &Identity) -> bool {
        let present = self.accounts.get(account.name());
        let others = self.config.as_ref().map(|config| &config.others);
        let is_served = match others.filter(|_| account.name() == DEFAULT_TENANT) {
            Some(Others::OwnUser) => identity.uid == Some(self.own),
            Some(Others::Refused) => false,
            Some(Others::Served(_)) | None => true,
        };
        is_served && present.is_some_and(|present| Arc::ptr_eq(present, account))
    }

    /// Returns the account of a process's tenant.
    ///
    /// # Errors
    /// Why the process is refused, in one line.
    pub(super) fn account_of(&self, identity: &Identity) -> Result<&Arc<Account>, String> {
        let own = self.own;
        let Identity { uid, cgroup, .. } = identity;
        let whose = match uid {
            Some(uid) => format!("of uid {uid}"),
            None => "of one of the users that have no uid in the node's user namespace".to_owned(),
        };
        let name = match &self.config {
            None if *uid == Some(own) => DEFAULT_TENANT,
            None => {
                return Err(format!(
                    "it serves uid {own} alone, and this process is {whose}: `rdmux node --config` serves several users"
                ));
            }
            Some(config) => {
                let cgroup = match cgroup {
                    Ok(cgroup) => Some(cgroup.as_str()),
                    // A process that could hide its control group would choose its tenant.
                    Err(why) if config.has_cgroups() => {
                        return Err(format!(
                            "its tenants are told apart by control groups, and that of this process is unknown: {why}"
                        ));
                    }
                    Err(_) => None,
                };
                match config.assign(*uid, cgroup, own) {
                    Assignment::Tenant(at) => config.tenants[at].name.as_str(),
                    Assignment::Default => DEFAULT_TENANT,
                    Assignment::Refused => {
                        let place = cgroup.map_or(String::new(), |path| format!(" in control group {path}"));
                        return Err(format!(
                            "this process, {whose}{place}, is in none of its tenants, and it refuses others"
                        ));
                    }
                }
            }
        };
        self.accounts
            .get(name)
            .ok_or_else(|| format!("it has no account of the tenant {name}"))
    }
}

/// Returns the tenants of a configuration, the default one too.
fn settings(config: &Config) -> impl Iterator<Item = (&str, Settings)> {
    let named = config.tenants.iter();
    let named = named.map(|tenant| (tenant.name.as_str(), tenant.settings));
    named.chain([(DEFAULT_TENANT, config.default_settings())])
}

/// Time after which a worker tells the others again how much waits.
const PUBLISH_NS: u64 = 1_000_000;

/// The tenants of a node in the scheduler of a worker.
#[derive(Debug)]
pub(super) struct Schedule {
    /// The worker's place among the workers.
    worker: usize,
    tenants: Vec<Scheduled>,
    /// Tenants that are no more in the configuration.
    removed: Vec<TenantId>,
    rate_bps: Option<u64>,
    /// Set if there are rates that the workers have to divide.
    divides: bool,
    /// When the worker has told the others last how much waits.
    published: Time,
    /// The division that is in force.
    demands: Vec<Demand>,
}

/// A tenant in the scheduler of a worker.
#[derive(Debug)]
struct Scheduled {
    account: Arc<Account>,
    tenant: TenantId,
    entitlement: Entitlement,
    /// Most queue pairs with requests that wait since the others were told.
    waiting: u32,
}

impl Schedule {
    /// Returns the schedule of a worker, without tenants.
    pub(super) fn new(worker: usize) -> Schedule {
        Schedule {
            worker,
            tenants: Vec::new(),
            removed: Vec::new(),
            rate_bps: None,
            divides: false,
            published: Time(0),
            demands: Vec::new(),
        }
    }

    /// Has the scheduler know the tenants as they are now. Applications of those that are gone are [moved](Tenants::keeps), and then
    /// [`Schedule::sweep`] removes what is left.
    pub(super) fn set<B>(&mut self, egress: &mut Egress<B>, now: Time, tenants: &Tenants) {
        self.rate_bps = tenants.rate_bps();
        egress.set_rate(now, self.rate_bps);
        let mut known = std::mem::take(&mut self.tenants);
        for (account, entitlement) in tenants.entitled() {
            let at = known
                .iter()
                .position(|known| Arc::ptr_eq(&known.account, account));
            let tenant = match at {
                Some(at) => {
                    let tenant = known.swap_remove(at).tenant;
                    egress.set_tenant(now, tenant, &entitlement);
                    tenant
                }
                None => egress.add_tenant(&entitlement),
            };
            self.tenants.push(Scheduled {
                account: account.clone(),
                tenant,
                entitlement,
                waiting: 0,
            });
        }
        self.removed.extend(known.into_iter().map(|known| known.tenant));
        let has_rate =
            |one: &Scheduled| one.entitlement.rate_bps > 0 || one.entitlement.ceiling_bps.is_some();
        self.divides = tenants.workers > 1 && (self.rate_bps.is_some() || self.tenants.iter().any(has_rate));
        self.demands.clear();
    }

    /// Tells the other workers how much waits here, at most once a millisecond unless something begins to wait, and takes this worker's part of the
    /// rates. `sleeps`: the worker is about to sleep.
    pub(super) fn divide<B>(&mut self, egress: &mut Egress<B>, now: Time, sleeps: bool) {
        if !self.divides {
            return;
        }
        let is_due = sleeps || now.since_ns(self.published) >= PUBLISH_NS;
        for one in &mut self.tenants {
            let waiting = egress.waiting(one.tenant);
            one.waiting = if sleeps { waiting } else { one.waiting.max(waiting) };
            let published = &one.account.waiting[self.worker];
            if is_due || one.waiting > 0 && published.load(Ordering::Relaxed) == 0 {
                published.store(one.waiting, Ordering::Relaxed);
            }
            if is_due {
                one.waiting = waiting;
            }
        }
        if is_due {
            self.published = now;
        }
        let demands = self.tenants.iter().map(|one| {
            let waiting = one
                .account
                .waiting
                .iter()
                .map(|waiting| waiting.load(Ordering::Relaxed));
            Demand {
                entitlement: one.entitlement,
                here: one.account.waiting[self.worker].load(Ordering::Relaxed),
                all: waiting.sum(),
            }
        });
        if demands.clone().eq(self.demands.iter().copied()) {
            return;
        }
        self.demands = demands.collect();
        let (rate_bps, entitlements) = divide(self.rate_bps, &self.demands);
        egress.set_rate(now, rate_bps);
        for (one, entitlement) in self.tenants.iter().zip(entitlements) {
            egress.set_tenant(now, one.tenant, &entitlement);
        }
    }

    /// Removes tenants of former configurations from the scheduler, as soon as nothing is in them.
    pub(super) fn sweep<B>(&mut self, egress: &mut Egress<B>) {
        self.removed.retain(|tenant| {
            let is_empty = !egress.has_groups(*tenant);
            if is_empty {
                egress.remove_tenant(*tenant);
            }
            !is_empty
        });
    }

    /// Returns whether a tenant in the scheduler is one of the configuration.
    pub(super) fn has(&self, tenant: TenantId) -> bool {
        self.tenants.iter().any(|known| known.tenant == tenant)
    }

    /// Returns the tenant of an account in the scheduler; `None`: each application is one of its own, as the node has no configuration.
    pub(super) fn tenant_of(&self, account: &Arc<Account>) -> Option<TenantId> {
        let mut known = self.tenants.iter();
        let known = known.find(|known| Arc::ptr_eq(&known.account, account));
        known.map(|known| known.tenant)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::egress::{self, GroupOptions};
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(Path::new("/etc/node.toml"), text, &|_| Ok(None))
            .unwrap()
            .0
    }

    const NOW: Time = Time(1_000_000);

    const CAPACITY: Capacity = Capacity {
        queue_pairs: 300,
        regions: 600,
    };

    fn egress() -> Egress<()> {
        Egress::new(NOW, egress::Limits::default())
    }

    fn tenants(config: Option<Config>) -> Tenants {
        Tenants::new(config, CAPACITY, 1)
    }

    fn identity(uid: u32, cgroup: Result<&str, &'static str>) -> Identity {
        Identity {
            uid: Some(uid),
            pid: 1,
            cgroup: cgroup.map(str::to_owned),
        }
    }

    fn refused(tenants: &Tenants, identity: &Identity) -> String {
        tenants
            .account_of(identity)
            .map(|account| account.name())
            .unwrap_err()
    }

    #[test]
    fn charge__until_the_limit_and_again_once_something_has_ended() {
        let text = "[tenant.a]\nuid = [1]\nlimits = { queue_pairs = 2, bytes = \"8K\" }";
        let tenants = tenants(Some(config(text)));
        let account = tenants.account_of(&identity(1, Err(""))).unwrap();
        let first = account.charge(Resource::QueuePairs, 1).unwrap();
        let _second = account.charge(Resource::QueuePairs, 1).unwrap();
        let refusal = account.charge(Resource::QueuePairs, 1).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::Limit);
        assert_eq!(
            refusal.text,
            "the tenant a has 2 of at most 2 queue pairs: raise limits.queue_pairs in [tenant.a] of /etc/node.toml"
        );
        drop(first);
        let _third = account.charge(Resource::QueuePairs, 1).unwrap();
        let refusal = account.charge(Resource::Bytes, u64::MAX).unwrap_err();
        assert_eq!(
            refusal.text,
            "the tenant a has 0 of at most 8192 bytes in memory regions: raise limits.bytes in [tenant.a] of /etc/node.toml"
        );
    }

    #[test]
    fn seat__of_programs_that_hold_the_node_as_well() {
        let text = "[tenant.a]\nuid = [1]\nlimits.applications = 1\n[tenant.b]\nuid = [2]\n[tenant.c]\nuid = [3]\nlimits.applications = 0";
        let tenants = tenants(Some(config(text)));
        let [a, b, c] = [1, 2, 3].map(|uid| tenants.account_of(&identity(uid, Err(""))).unwrap().clone());
        let _hold = a.seat().unwrap();
        let mut program = a.seat().unwrap();
        assert_eq!(
            a.seat().unwrap_err().text,
            "2 processes of the tenant have or hold the node, as many as may: \
             the tenant a has 0 of at most 1 applications: raise limits.applications in [tenant.a] of /etc/node.toml"
        );
        let _charge = a.charge(Resource::Applications, 1).unwrap();
        assert!(
            a.seat()
                .unwrap_err()
                .text
                .starts_with("the tenant a has 1 of at most 1")
        );
        program.move_to(&b);
        assert!(a.seat().is_ok());
        // Holds of a tenant take no more than its part.
        let part = APPLICATIONS_MAX / 4;
        let seats: Vec<Seat> = (1..part).map(|_| b.seat().unwrap()).collect();
        assert!(b.seat().is_err());
        drop(seats);
        assert!(b.seat().is_ok());
        assert!(
            c.seat()
                .unwrap_err()
                .text
                .starts_with("the tenant c has 0 of at most 0")
        );
    }

    #[test]
    fn charge__an_equal_part_without_a_limit() {
        let text = "[tenant.a]\nuid = [1]\n[tenant.b]\nuid = [2]\nlimits.regions = 90\n[default]";
        let tenants = tenants(Some(config(text)));
        let limits = [1, 2, 3].map(|uid| {
            let account = tenants.account_of(&identity(uid, Err(""))).unwrap();
            [Resource::QueuePairs, Resource::Regions, Resource::Bytes].map(|resource| account.limit(resource))
        });
        let part = [100, 200, UNLIMITED];
        assert_eq!(limits, [part, [100, 90, UNLIMITED], part]);
        let refused = self::tenants(Some(config("[tenant.a]\nuid = [1]\n[default]\nrefuse = true")));
        let account = refused.account_of(&identity(1, Err(""))).unwrap();
        assert_eq!(account.limit(Resource::QueuePairs), 300);
    }

    #[test]
    fn set__accounts_of_tenants_that_remain() {
        let both = "[tenant.a]\nuid = [1]\n[tenant.b]\nuid = [2]\n";
        let mut tenants = Tenants::new(Some(config(both)), CAPACITY, 1);
        let [a, b] = [1, 2].map(|uid| tenants.account_of(&identity(uid, Err(""))).unwrap().clone());
        let mut charge = a.charge(Resource::Regions, 5).unwrap();
        let _other = b.charge(Resource::Regions, 1).unwrap();
        tenants.set(config(
            "[tenant.b]\nuid = [1]\nlimits.regions = 3\n[default]\nlimits.regions = 0",
        ));
        let nobody = identity(99, Err(""));
        assert_eq!(
            [&a, &b].map(|account| tenants.keeps(account, &nobody)),
            [false, true]
        );
        assert_eq!(b.limit(Resource::Regions), 3);
        // An application of a tenant that is gone counts for its next one, also beyond the limit.
        let next = tenants.account_of(&identity(1, Err(""))).unwrap();
        assert!(Arc::ptr_eq(next, &b));
        charge.move_to(next);
        let text = next.charge(Resource::Regions, 1).unwrap_err().text;
        assert!(text.contains("has 6 of at most 3 memory regions"), "{text}");
        drop(charge);
        assert!(next.charge(Resource::Regions, 1).is_ok());
        // The tenant comes back with an account of its own.
        tenants.set(config(both));
        assert!(!tenants.keeps(&a, &nobody));
    }

    #[test]
    fn sweep__tenants_that_are_gone() {
        let mut egress = egress();
        let mut tenants = tenants(Some(config("[tenant.a]\nuid = [1]")));
        let mut schedule = Schedule::new(0);
        schedule.set(&mut egress, NOW, &tenants);
        let account = tenants.account_of(&identity(1, Err(""))).unwrap().clone();
        let a = schedule.tenant_of(&account).unwrap();
        tenants.set(config(""));
        schedule.set(&mut egress, NOW, &tenants);
        assert_eq!(schedule.tenant_of(&account), None);
        // The scheduler forgets the former one once nothing is in it.
        let options = GroupOptions {
            class: 0,
            path_mtu: 1024,
            depth: 8,
            slots: None,
            may_be_quiet: true,
        };
        let group = egress.add_group(NOW, a, &options).unwrap();
        schedule.sweep(&mut egress);
        assert_eq!(schedule.removed, [a]);
        egress.remove_group(group);
        schedule.sweep(&mut egress);
        assert!(schedule.removed.is_empty());
        assert!(egress.add_group(NOW, a, &options).is_none());
    }

    #[test]
    fn keeps__the_default_tenant_as_long_as_it_is_for_such_processes() {
        let own = folder::uid();
        let (own, other) = (identity(own, Err("")), identity(own.wrapping_add(1), Err("")));
        let mut tenants = Tenants::new(Some(config("[default]")), CAPACITY, 1);
        let default = tenants.account_of(&other).unwrap().clone();
        for (text, keeps) in [
            ("[default]", [true, true]),
            ("", [true, false]),
            ("[default]\nrefuse = true", [false; 2]),
        ] {
            tenants.set(config(text));
            assert_eq!(
                [&own, &other].map(|identity| tenants.keeps(&default, identity)),
                keeps,
                "{text}"
            );
        }
    }

    #[test]
    fn account_of__each_refusal() {
        let own = folder::uid();
        let other = own.wrapping_add(1);
        let unknown = "the process has ended";
        let without = tenants(None);
        assert!(without.account_of(&identity(own, Err(unknown))).is_ok());
        assert_eq!(
            refused(&without, &identity(other, Err(unknown))),
            format!(
                "it serves uid {own} alone, and this process is of uid {other}: `rdmux node --config` serves several users"
            )
        );
        let users = tenants(Some(config("")));
        assert!(users.account_of(&identity(own, Err(unknown))).is_ok());
        assert_eq!(
            refused(&users, &identity(other, Ok("/a"))),
            format!(
                "this process, of uid {other} in control group /a, is in none of its tenants, and it refuses others"
            )
        );
        let nameless = Identity {
            uid: None,
            pid: 1,
            cgroup: Err(unknown),
        };
        assert!(refused(&users, &nameless).contains("users that have no uid in the node's user namespace"));
        let groups = tenants(Some(config("[default]\n[tenant.a]\ncgroup = [\"/a\"]")));
        assert_eq!(
            refused(&groups, &identity(own, Err(unknown))),
            "its tenants are told apart by control groups, and that of this process is unknown: the process has ended"
        );
        assert_eq!(
            groups.account_of(&identity(other, Ok("/a/b"))).unwrap().name(),
            "a"
        );
        assert_eq!(
            groups.account_of(&identity(other, Ok("/b"))).unwrap().name(),
            "default"
        );
    }
}
