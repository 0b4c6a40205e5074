//! Reads the tables of a file. Each value that is wrong is one error, and reading goes on behind it.

use std::collections::HashMap;
use std::io;
use std::num::{NonZeroU8, NonZeroU16};
use std::path::Path;

use rdmux_rnic::sched::{CLASSES, Entitlement, Policy};
use rdmux_verbs::{faults::parse_rate, parse_size};
use strum::IntoEnumIterator;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::super::APPLICATIONS_MAX;
use super::{
    Config, ConfigError, DEFAULT_TENANT, Finding, Limits, Others, Resource, STRICT_PERCENT_DEFAULT, Settings,
    TENANTS_MAX, Tenant, User, rate_text,
};

const TOP: &str = "at the top";
const TOP_KEYS: [&str; 4] = ["rate", "strict_percent", "tenant", "default"];
const SETTINGS_KEYS: [&str; 5] = ["weight", "rate", "ceiling", "classes", "limits"];
const WHO_KEYS: [&str; 2] = ["uid", "cgroup"];
const REFUSE: &str = "refuse";

/// Bytes of a tenant's name.
const NAME_BYTES_MAX: usize = 64;
/// Characters of a value that an error repeats.
const SHOWN_MAX: usize = 40;
/// Most of a resource that can be a limit: more than any host has.
const COUNT_MAX: u64 = i64::MAX as u64;

const RATE: &str = "a rate such as \"10Gbit\": a number with kbit, Mbit, Gbit or Tbit, at least \"1kbit\"";

/// Distance, by [`strsim::jaro_winkler`], within which a key is taken for a known one.
const NEAR: f64 = 0.75;

pub(super) fn parse(
    file: &Path,
    text: &str,
    uid_of_name: &dyn Fn(&str) -> io::Result<Option<u32>>,
) -> Result<(Config, Vec<Finding>), ConfigError> {
    let mut reader = Reader {
        file,
        text,
        uid_of_name,
        errors: Vec::new(),
        warnings: Vec::new(),
    };
    let config = match DeTable::parse(text) {
        Ok(table) => reader.config(table.get_ref()),
        Err(error) => {
            let at = error.span().map_or(0, |span| span.start);
            let message = error.message().replace('\n', ", ");
            reader.wrong(at, format!("not TOML: {message}"));
            None
        }
    };
    let Reader {
        mut errors,
        mut warnings,
        ..
    } = reader;
    errors.sort_by_key(|error| error.line);
    warnings.sort_by_key(|warning| warning.line);
    match config {
        Some(config) if errors.is_empty() => Ok((config, warnings)),
        _ => Err(ConfigError::Wrong(errors)),
    }
}

/// A table of the file, with the name that errors give it.
#[derive(Clone, Copy)]
struct Section<'a, 'i> {
    title: &'a str,
    table: &'a DeTable<'i>,
}

struct Reader<'a> {
    file: &'a Path,
    text: &'a str,
    uid_of_name: &'a dyn Fn(&str) -> io::Result<Option<u32>>,
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
}

impl Reader<'_> {
    fn finding(&self, at: usize, text: String) -> Finding {
        let before = self.text.as_bytes().get(..at).unwrap_or_default();
        Finding {
            file: self.file.to_owned(),
            line: 1 + before.iter().filter(|byte| **byte == b'\n').count(),
            text,
        }
    }

    fn line(&self, at: usize) -> usize {
        self.finding(at, String::new()).line
    }

    fn wrong(&mut self, at: usize, text: String) {
        let finding = self.finding(at, text);
        self.errors.push(finding);
    }

    fn warn(&mut self, at: usize, text: String) {
        let finding = self.finding(at, text);
        self.warnings.push(finding);
    }

    /// Reports a value that is none of its key.
    fn wrong_value(&mut self, section: Section<'_, '_>, key: &str, value: &Spanned<DeValue<'_>>, give: &str) {
        let title = section.title;
        let shown = self.shown(value);
        self.wrong(
            value.span().start,
            format!("{key} = {shown} {title}: give {give}"),
        );
    }

    /// Returns a value as the file has it, shortened.
    fn shown(&self, value: &Spanned<DeValue<'_>>) -> String {
        let source = self.text.get(value.span()).unwrap_or_default();
        let line = source.lines().next().unwrap_or_default();
        let short: String = line.chars().take(SHOWN_MAX).collect();
        match short.len() < source.len() {
            true => format!("{short}..."),
            false => short,
        }
    }

    /// Reports keys that the section does not have.
    fn check_keys(&mut self, section: Section<'_, '_>, known: &[&str]) {
        for key in section.table.keys() {
            let name = key.get_ref().as_ref();
            if known.contains(&name) {
                continue;
            }
            let nearness = |known: &&&str| strsim::jaro_winkler(name, known);
            let nearest = known
                .iter()
                .max_by(|one, other| nearness(one).total_cmp(&nearness(other)))
                .filter(|known| nearness(known) >= NEAR);
            let advice = match nearest {
                Some(nearest) => format!("did you mean {nearest}?"),
                None => format!("the keys are {}", known.join(", ")),
            };
            let title = section.title;
            self.wrong(key.span().start, format!("no key {name} {title}: {advice}"));
        }
    }

    /// Reads a value by `read`, which returns `None` for one that is none of its key.
    fn value<T>(
        &mut self,
        section: Section<'_, '_>,
        key: &str,
        give: &str,
        read: impl FnOnce(&DeValue<'_>) -> Option<T>,
    ) -> Option<T> {
        let value = section.table.get(key)?;
        let read = read(value.get_ref());
        if read.is_none() {
            self.wrong_value(section, key, value, give);
        }
        read
    }

    fn config(&mut self, table: &DeTable<'_>) -> Option<Config> {
        let top = Section { title: TOP, table };
        self.check_keys(top, &TOP_KEYS);
        let rate_bps = self.value(top, "rate", RATE, rate);
        let percent = self.value(top, "strict_percent", "a number from 1 to 100", |value| {
            number(value, 1, 100)
        });
        let tenants = self.tenants(top);
        let others = self.others(top);
        let config = Config {
            file: self.file.to_owned(),
            rate_bps,
            strict_percent: percent.map_or(STRICT_PERCENT_DEFAULT, |percent| percent as u8),
            tenants,
            others,
        };
        self.check_rates(top, &config);
        Some(config)
    }

    fn tenants(&mut self, top: Section<'_, '_>) -> Vec<Tenant> {
        let give = "tables such as [tenant.db]";
        let Some(entry) = top.table.get("tenant") else {
            return Vec::new();
        };
        let Some(tables) = entry.get_ref().as_table() else {
            self.wrong_value(top, "tenant", entry, give);
            return Vec::new();
        };
        // The parser sorts them by name.
        let mut entries: Vec<_> = tables.iter().collect();
        entries.sort_by_key(|(name, _)| name.span().start);
        let mut places = HashMap::new();
        let mut tenants = Vec::new();
        for (name, entry) in entries {
            let at = name.span().start;
            let name = name.get_ref().as_ref();
            let Some(table) = entry.get_ref().as_table() else {
                let shown = self.shown(entry);
                self.wrong(at, format!("tenant.{name} = {shown}: give {give}"));
                continue;
            };
            let title = format!("in [tenant.{name}]");
            let section = Section { title: &title, table };
            self.check_name(at, name);
            self.check_keys(section, &[&WHO_KEYS[..], &SETTINGS_KEYS].concat());
            let users = self.users(section, &mut places);
            let cgroups = self.cgroups(section, &mut places);
            if !WHO_KEYS.iter().any(|key| table.contains_key(*key)) {
                self.warn(
                    at,
                    format!("[tenant.{name}] has neither uid nor cgroup: nobody is in it"),
                );
            }
            tenants.push(Tenant {
                name: name.to_owned(),
                users,
                cgroups,
                settings: self.settings(section),
            });
        }
        if tenants.len() > TENANTS_MAX {
            let count = tenants.len();
            self.wrong(
                entry.span().start,
                format!("{count} tenants: a node has at most {TENANTS_MAX}"),
            );
        }
        tenants
    }

    fn check_name(&mut self, at: usize, name: &str) {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name == DEFAULT_TENANT {
            self.wrong(
                at,
                format!("the name {name} is that of the tenant of [default]: give another one"),
            );
        } else if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(is_plain) {
            let shown: String = name.escape_debug().take(SHOWN_MAX).collect();
            self.wrong(
                at,
                format!(
                    "\"{shown}\" is no name of a tenant: give 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' or '.'"
                ),
            );
        }
    }

    fn others(&mut self, top: Section<'_, '_>) -> Others {
        let Some(entry) = top.table.get(DEFAULT_TENANT) else {
            return Others::OwnUser;
        };
        let Some(table) = entry.get_ref().as_table() else {
            self.wrong_value(top, DEFAULT_TENANT, entry, "a table [default]");
            return Others::OwnUser;
        };
        let section = Section {
            title: "in [default]",
            table,
        };
        self.check_keys(section, &[&[REFUSE], &SETTINGS_KEYS[..]].concat());
        let refuse = self.value(section, REFUSE, "true or false", |value| value.as_bool());
        let settings = self.settings(section);
        if refuse != Some(true) {
            return Others::Served(settings);
        }
        for (key, _) in table.iter().filter(|(key, _)| key.get_ref() != REFUSE) {
            let (at, key) = (key.span().start, key.get_ref());
            self.wrong(
                at,
                format!(
                    "{key} in [default] beside refuse = true, which leaves nobody there: remove one of them"
                ),
            );
        }
        Others::Refused
    }

    fn settings(&mut self, section: Section<'_, '_>) -> Settings {
        let weights = "a number from 1 to 65535";
        let weight = self.value(section, "weight", weights, |value| {
            number(value, 1, u16::MAX.into()).and_then(|weight| NonZeroU16::new(weight as u16))
        });
        let rate_bps = self.value(section, "rate", RATE, rate);
        let ceiling_bps = self.value(section, "ceiling", RATE, rate);
        if let (Some(rate), Some(ceiling)) = (rate_bps, ceiling_bps)
            && ceiling < rate
            && let Some(place) = section.table.get("ceiling")
        {
            let (title, ceiling, rate) = (section.title, rate_text(ceiling), rate_text(rate));
            self.wrong(
                place.span().start,
                format!(
                    "the ceiling {title}, {ceiling}, is below the rate, {rate}: raise it, or lower the rate"
                ),
            );
        }
        Settings {
            entitlement: Entitlement {
                weight: weight.unwrap_or(NonZeroU16::MIN),
                rate_bps: rate_bps.unwrap_or(0),
                ceiling_bps,
                classes: self.classes(section),
            },
            limits: self.limits(section),
        }
    }

    fn classes(&mut self, section: Section<'_, '_>) -> [Policy; CLASSES] {
        let mut classes = [Policy::default(); CLASSES];
        let give = "a table of classes, such as { 0 = 4, 7 = \"strict\" }";
        let Some(entry) = section.table.get("classes") else {
            return classes;
        };
        let Some(table) = entry.get_ref().as_table() else {
            self.wrong_value(section, "classes", entry, give);
            return classes;
        };
        let title = format!("in classes {}", section.title);
        let section = Section { title: &title, table };
        let known: [String; CLASSES] = std::array::from_fn(|class| class.to_string());
        self.check_keys(section, &known.each_ref().map(String::as_str));
        for (class, key) in classes.iter_mut().zip(&known) {
            let policy = |value: &DeValue<'_>| match value.as_str() {
                Some("strict") => Some(Policy::Strict),
                Some(_) => None,
                None => {
                    let weight = NonZeroU8::new(number(value, 1, u8::MAX.into())? as u8);
                    weight.map(Policy::Ets)
                }
            };
            let give = "a weight from 1 to 255, or \"strict\"";
            if let Some(policy) = self.value(section, key, give, policy) {
                *class = policy;
            }
        }
        classes
    }

    fn limits(&mut self, section: Section<'_, '_>) -> Limits {
        let mut limits = Limits::default();
        let Some(entry) = section.table.get("limits") else {
            return limits;
        };
        let Some(table) = entry.get_ref().as_table() else {
            let give = "a table of limits, such as { queue_pairs = 100 }";
            self.wrong_value(section, "limits", entry, give);
            return limits;
        };
        let title = format!("in limits {}", section.title);
        let section = Section { title: &title, table };
        let known: Vec<&str> = Resource::iter().map(Resource::key).collect();
        self.check_keys(section, &known);
        for resource in Resource::iter() {
            let limit = match resource {
                Resource::Bytes => {
                    let give = "bytes, or a size with a binary unit such as \"64GiB\"";
                    let bytes = |value: &DeValue<'_>| match value.as_str() {
                        Some(text) => parse_size(text).filter(|bytes| *bytes <= COUNT_MAX),
                        None => number(value, 0, COUNT_MAX),
                    };
                    self.value(section, resource.key(), give, bytes)
                }
                _ => self.value(section, resource.key(), "a number from 0 on", |value| {
                    number(value, 0, COUNT_MAX)
                }),
            };
            limits.set(resource, limit);
        }
        let most = APPLICATIONS_MAX as u64;
        if let Some(applications) = limits.get(Resource::Applications).filter(|limit| *limit > most)
            && let Some(value) = table.get(Resource::Applications.key())
        {
            self.warn(
                value.span().start,
                format!("applications = {applications} {title}: a node has at most {most} applications"),
            );
        }
        limits
    }

    /// Reads users. `places`: whom the file has named so far, with the tenant and the line.
    fn users(&mut self, section: Section<'_, '_>, places: &mut Places) -> Vec<User> {
        let give = "a list of numbers and names of users, such as [1000, \"alice\"]";
        let mut users = Vec::new();
        for value in self.list(section, "uid", give) {
            let at = value.span().start;
            let user = match value.get_ref() {
                DeValue::String(name) => match (self.uid_of_name)(name) {
                    Ok(Some(uid)) => User {
                        uid,
                        name: Some(name.clone().into_owned()),
                    },
                    Ok(None) => {
                        let title = section.title;
                        self.wrong(
                            at,
                            format!(
                                "uid \"{name}\" {title}: this host has no such user: give a user's name or number"
                            ),
                        );
                        continue;
                    }
                    Err(error) => {
                        let title = section.title;
                        self.wrong(
                            at,
                            format!("uid \"{name}\" {title}: the system cannot look it up: {error}"),
                        );
                        continue;
                    }
                },
                // The highest number is nobody's.
                uid => match number(uid, 0, u64::from(u32::MAX - 1)) {
                    Some(uid) => User {
                        uid: uid as u32,
                        name: None,
                    },
                    None => {
                        self.wrong_value(section, "uid", value, give);
                        continue;
                    }
                },
            };
            if self.is_first(section, at, format!("uid {}", user.uid), places) {
                users.push(user);
            }
        }
        users
    }

    fn cgroups(&mut self, section: Section<'_, '_>, places: &mut Places) -> Vec<String> {
        let give = "a list of paths in the tree of control groups, such as [\"/system.slice/db.service\"]";
        let mut cgroups = Vec::new();
        for value in self.list(section, "cgroup", give) {
            let Some(path) = value.get_ref().as_str().and_then(plain_path) else {
                self.wrong_value(section, "cgroup", value, give);
                continue;
            };
            if self.is_first(section, value.span().start, format!("cgroup {path}"), places) {
                cgroups.push(path);
            }
        }
        cgroups
    }

    fn list<'t, 'i>(
        &mut self,
        section: Section<'t, 'i>,
        key: &str,
        give: &str,
    ) -> Vec<&'t Spanned<DeValue<'i>>> {
        let Some(value) = section.table.get(key) else {
            return Vec::new();
        };
        let Some(list) = value.get_ref().as_array() else {
            self.wrong_value(section, key, value, give);
            return Vec::new();
        };
        list.iter().collect()
    }

    /// Returns whether the file names somebody for the first time.
    fn is_first(&mut self, section: Section<'_, '_>, at: usize, who: String, places: &mut Places) -> bool {
        if let Some((title, line)) = places.get(&who) {
            let text = format!(
                "{who} {} is {title} already, at line {line}: remove one, as nobody is in two tenants",
                section.title
            );
            self.wrong(at, text);
            return false;
        }
        let line = self.line(at);
        places.insert(who, (section.title.to_owned(), line));
        true
    }

    /// Warns of rates that the device's rate does not allow.
    fn check_rates(&mut self, top: Section<'_, '_>, config: &Config) {
        let (Some(device), Some(place)) = (config.rate_bps, top.table.get("rate")) else {
            return;
        };
        let at = place.span().start;
        let default = config.default_settings();
        let all = config
            .tenants
            .iter()
            .map(|tenant| (tenant.name.as_str(), &tenant.settings));
        let all: Vec<_> = all.chain([(DEFAULT_TENANT, &default)]).collect();
        let sum = all.iter().fold(0u64, |sum, (_, settings)| {
            sum.saturating_add(settings.entitlement.rate_bps)
        });
        if sum > device {
            self.warn(
                at,
                format!(
                    "the guaranteed rates are {} together, more than the device's {}: when all tenants send, they share it by weight",
                    rate_text(sum),
                    rate_text(device)
                ),
            );
        }
        for (name, settings) in all {
            if let Some(ceiling) = settings
                .entitlement
                .ceiling_bps
                .filter(|ceiling| *ceiling > device)
            {
                self.warn(
                    at,
                    format!(
                        "the ceiling of {name}, {}, is more than the device's rate, {}, so it limits nothing",
                        rate_text(ceiling),
                        rate_text(device)
                    ),
                );
            }
        }
    }
}

/// Users and control groups that the file has named, with title and line of the place.
type Places = HashMap<String, (String, usize)>;

fn rate(value: &DeValue<'_>) -> Option<u64> {
    value.as_str().and_then(parse_rate)
}

fn number(value: &DeValue<'_>, least: u64, most: u64) -> Option<u64> {
    let integer = value.as_integer()?;
    let number = u64::from_str_radix(integer.as_str(), integer.radix()).ok()?;
    (least..=most).contains(&number).then_some(number)
}

/// Returns an absolute path without a slash at its end, if it has no component that a control group has not.
fn plain_path(path: &str) -> Option<String> {
    let inner = path.strip_prefix('/')?;
    let inner = inner.strip_suffix('/').unwrap_or(inner);
    let is_plain =
        |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\0', '\n']);
    (inner.is_empty() || inner.split('/').all(is_plain)).then(|| format!("/{inner}"))
}
