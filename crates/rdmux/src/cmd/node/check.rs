//! `rdmux node check`: checks a file of tenants, and shows what it gives to whom.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use rdmux_share::node::APPLICATIONS_MAX;
use rdmux_share::node::config::{
    Config, ConfigError, DEFAULT_TENANT, Finding, Others, Resource, Settings, Tenant, User, rate_text,
};
use rdmux_verbs::sched::Policy;
use serde_json::{Value, json};
use strum::IntoEnumIterator;

use crate::output::{self, Align};

/// Check a file of tenants, and show what it gives to whom.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
The status is 1 if the file is wrong; each error is a line with file, line and remedy. Names of users are looked up on this host.

JSON: one object: file, errors and warnings (arrays of line, text), and unless there are errors rate_bps (or null), strict_percent, \
others (own user, refused or default: who matches no tenant) and tenants (array of name, users (array of uid, name), cgroups, weight, \
rate_bps, ceiling_bps, classes (eight of a weight or strict), limits (null: not set)).")]
pub(super) struct Args {
    /// The file.
    file: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let (config, warnings) = match Config::read(&args.file) {
        Ok(read) => read,
        Err(ConfigError::Wrong(mut errors)) => {
            if args.json {
                let object = json!({
                    "file": args.file,
                    "errors": findings_json(&errors),
                    "warnings": [],
                });
                output::say(&object.to_string());
            }
            let last = errors.pop();
            for error in errors {
                output::error(&anyhow!("{error}"));
            }
            return last.map_or(Ok(()), |last| Err(anyhow!("{last}")));
        }
        Err(error) => return Err(error.into()),
    };
    if args.json {
        output::say(&describe_json(&config, &warnings).to_string());
    } else {
        output::say(&describe(&config));
    }
    super::warn(&warnings);
    Ok(())
}

fn findings_json(findings: &[Finding]) -> Value {
    let of = |finding: &Finding| json!({"line": finding.line, "text": finding.text});
    findings.iter().map(of).collect()
}

/// Returns the tenants with the default one, if it may have applications.
fn all_tenants(config: &Config) -> Vec<Tenant> {
    let mut tenants = config.tenants.clone();
    if config.others != Others::Refused {
        tenants.push(Tenant {
            name: DEFAULT_TENANT.into(),
            users: Vec::new(),
            cgroups: Vec::new(),
            settings: config.default_settings(),
        });
    }
    tenants
}

fn describe(config: &Config) -> String {
    let rate = config.rate_bps.map_or("as fast as it can".into(), rate_text);
    let strict = config.strict_percent;
    let mut columns = vec![
        ("tenant", Align::Left),
        ("users", Align::Left),
        ("control groups", Align::Left),
        ("weight", Align::Right),
        ("rate", Align::Right),
        ("ceiling", Align::Right),
        ("classes", Align::Left),
    ];
    columns.extend(Resource::iter().map(|resource| (resource.key(), Align::Right)));
    let rows: Vec<Vec<String>> = all_tenants(config)
        .iter()
        .map(|tenant| row(tenant, config))
        .collect();
    let others = match config.others {
        Others::OwnUser => "other users are refused",
        Others::Refused => "processes of no tenant are refused",
        Others::Served(_) => "processes of no tenant are in default",
    };
    let table = output::table(&columns, &rows);
    format!(
        "device: {rate}; strict classes at most {strict} % of a tenant's bytes while others wait\n{table}\n{others}"
    )
}

fn row(tenant: &Tenant, config: &Config) -> Vec<String> {
    let Settings { entitlement, .. } = &tenant.settings;
    let list = |texts: Vec<String>| match texts.is_empty() {
        true => "-".to_owned(),
        false => texts.join(" "),
    };
    let users = match (tenant.name.as_str(), &config.others) {
        (DEFAULT_TENANT, Others::OwnUser) => "the node's".into(),
        (DEFAULT_TENANT, _) => "others".into(),
        _ => list(tenant.users.iter().map(user_text).collect()),
    };
    let rate = match entitlement.rate_bps {
        0 => "-".into(),
        bps => rate_text(bps),
    };
    let mut row = vec![
        tenant.name.clone(),
        users,
        list(tenant.cgroups.clone()),
        entitlement.weight.to_string(),
        rate,
        entitlement.ceiling_bps.map_or("-".into(), rate_text),
        classes_text(&entitlement.classes),
    ];
    row.extend(Resource::iter().map(|resource| limit_text(config, &tenant.settings, resource)));
    row
}

fn user_text(user: &User) -> String {
    match &user.name {
        Some(name) => format!("{name}({})", user.uid),
        None => user.uid.to_string(),
    }
}

/// Returns the classes from the highest one on, those that are served alike together: `7 strict, 6-1 share 1, 0 shares 4`.
fn classes_text(classes: &[Policy]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut highest = classes.len();
    while highest > 0 {
        let policy = classes[highest - 1];
        let alike = classes[..highest]
            .iter()
            .rev()
            .take_while(|other| **other == policy);
        let lowest = highest - alike.count();
        let which = match highest - 1 {
            one if one == lowest => one.to_string(),
            first => format!("{first}-{lowest}"),
        };
        parts.push(match policy {
            Policy::Strict => format!("{which}:strict"),
            Policy::Ets(weight) => format!("{which}:{weight}"),
        });
        highest = lowest;
    }
    parts.join(" ")
}

fn limit_text(config: &Config, settings: &Settings, resource: Resource) -> String {
    match (settings.limits.get(resource), resource, resource.most_of_each()) {
        (Some(limit), Resource::Bytes, _) => output::bytes(limit),
        (Some(limit), ..) => limit.to_string(),
        (None, Resource::Applications, _) => (APPLICATIONS_MAX / config.served_tenants().max(1)).to_string(),
        (None, _, Some(most)) => format!("{most} each"),
        (None, _, None) => "-".into(),
    }
}

fn describe_json(config: &Config, warnings: &[Finding]) -> Value {
    let tenants: Value = all_tenants(config).iter().map(tenant_json).collect();
    json!({
        "file": config.file,
        "errors": [],
        "warnings": findings_json(warnings),
        "rate_bps": config.rate_bps,
        "strict_percent": config.strict_percent,
        "others": match config.others {
            Others::OwnUser => "own user",
            Others::Refused => "refused",
            Others::Served(_) => "default",
        },
        "tenants": tenants,
    })
}

fn tenant_json(tenant: &Tenant) -> Value {
    let Settings { entitlement, limits } = &tenant.settings;
    let users: Value = tenant
        .users
        .iter()
        .map(|user| json!({"uid": user.uid, "name": user.name}))
        .collect();
    let classes: Value = entitlement
        .classes
        .iter()
        .map(|policy| match policy {
            Policy::Strict => json!("strict"),
            Policy::Ets(weight) => json!(weight),
        })
        .collect();
    let limits: serde_json::Map<String, Value> = Resource::iter()
        .map(|resource| (resource.key().to_owned(), json!(limits.get(resource))))
        .collect();
    json!({
        "name": tenant.name,
        "users": users,
        "cgroups": tenant.cgroups,
        "weight": entitlement.weight,
        "rate_bps": entitlement.rate_bps,
        "ceiling_bps": entitlement.ceiling_bps,
        "classes": classes,
        "limits": limits,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn describe__table_of_what_is_in_force() {
        let text = "rate = \"25Gbit\"\n[tenant.db]\nuid = [\"alice\", 7]\ncgroup = [\"/system.slice/db.service\"]\nweight = 3\n\
            rate = \"10Gbit\"\nceiling = \"12.5Gbit\"\nclasses = { 0 = 4, 6 = \"strict\", 7 = \"strict\" }\n\
            limits = { applications = 10, bytes = \"64GiB\" }\n[tenant.x]\nuid = [8]\n";
        let config = |more: &str| {
            let text = [text, more].concat();
            Config::parse(Path::new("f"), &text, &|_| Ok(Some(1000)))
                .unwrap()
                .0
        };
        let shown = describe(&config(""));
        let expected = "\
device: 25 Gbit/s; strict classes at most 90 % of a tenant's bytes while others wait
tenant  users          control groups            weight       rate      ceiling  classes             applications  queue_pairs      requests    regions   bytes
db      alice(1000) 7  /system.slice/db.service       3  10 Gbit/s  12.5 Gbit/s  7-6:strict 5-1:1 0:4            10    2048 each  1048576 each  4096 each  64 GiB
x       8              -                              1          -            -  7-0:1                          341    2048 each  1048576 each  4096 each       -
default  the node's    -                              1          -            -  7-0:1                          341    2048 each  1048576 each  4096 each       -
other users are refused";
        let plain = |text: &str| -> Vec<String> {
            let lines = text.lines();
            lines
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect()
        };
        assert_eq!(plain(&shown), plain(expected), "{shown}");
        let refused = describe(&config("[default]\nrefuse = true"));
        assert!(!refused.contains("\ndefault"), "{refused}");
        assert!(
            describe(&config("[default]\nweight = 2")).ends_with("processes of no tenant are in default")
        );
    }
}
