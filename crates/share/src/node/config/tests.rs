use std::num::{NonZeroU8, NonZeroU16};

use rdmux_rnic::sched::Policy;

use super::*;

const FILE: &str = "node.toml";

fn uids(name: &str) -> io::Result<Option<u32>> {
    match name {
        "alice" => Ok(Some(1000)),
        "bob" => Ok(Some(1001)),
        "remote" => Err(io::ErrorKind::TimedOut.into()),
        _ => Ok(None),
    }
}

fn parse(text: &str) -> Result<(Config, Vec<Finding>), ConfigError> {
    Config::parse(Path::new(FILE), text, &uids)
}

/// Returns the errors of a text, which has some.
fn errors(text: &str) -> Vec<String> {
    match parse(text) {
        Err(ConfigError::Wrong(errors)) => errors.iter().map(ToString::to_string).collect(),
        other => panic!("{text}: {other:?}"),
    }
}

fn config(text: &str) -> Config {
    parse(text).unwrap().0
}

#[test]
fn parse__file_with_each_key() {
    let config = config(
        r#"
        rate = "25Gbit"
        strict_percent = 80

        [tenant.db]
        uid = ["alice", 1_002]
        cgroup = ["/system.slice/db.service/", "/"]
        weight = 3
        rate = "10Gbit"
        ceiling = "12.5Gbit"
        classes = { 0 = 4, 7 = "strict" }

        [tenant.db.limits]
        applications = 10
        queue_pairs = 100
        requests = 0x1000
        regions = 0
        bytes = "64GiB"

        [tenant.batch]
        uid = ["bob"]

        [default]
        weight = 2
        limits.bytes = 4096
        "#,
    );
    assert_eq!(
        (config.rate_bps, config.strict_percent),
        (Some(25_000_000_000), 80)
    );
    let names: Vec<&str> = config.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    assert_eq!(names, ["db", "batch"], "in the order of the file");
    let db = &config.tenants[0];
    let users: Vec<_> = db
        .users
        .iter()
        .map(|user| (user.uid, user.name.as_deref()))
        .collect();
    assert_eq!(users, [(1000, Some("alice")), (1002, None)]);
    assert_eq!(db.cgroups, ["/system.slice/db.service", "/"]);
    let Settings { entitlement, limits } = db.settings;
    assert_eq!(entitlement.weight.get(), 3);
    assert_eq!(entitlement.rate_bps, 10_000_000_000);
    assert_eq!(entitlement.ceiling_bps, Some(12_500_000_000));
    assert_eq!(entitlement.classes[0], Policy::Ets(NonZeroU8::new(4).unwrap()));
    assert_eq!(entitlement.classes[1], Policy::default());
    assert_eq!(entitlement.classes[7], Policy::Strict);
    assert_eq!(
        limits,
        Limits([Some(10), Some(100), Some(4096), Some(0), Some(64 << 30)])
    );
    assert_eq!(config.tenants[1].settings, Settings::default());
    let Others::Served(default) = &config.others else {
        panic!("{:?}", config.others);
    };
    assert_eq!(default.entitlement.weight, NonZeroU16::new(2).unwrap());
    assert_eq!(default.limits.get(Resource::Bytes), Some(4096));
}

#[test]
fn parse__file_with_nothing() {
    let empty = config("");
    assert_eq!(
        (empty.rate_bps, empty.strict_percent),
        (None, STRICT_PERCENT_DEFAULT)
    );
    assert_eq!((empty.tenants.len(), &empty.others), (0, &Others::OwnUser));
    assert_eq!(config("[default]").others, Others::Served(Settings::default()));
    assert_eq!(config("[default]\nrefuse = true").others, Others::Refused);
}

/// Texts and their errors.
const WRONG: &[(&str, &str)] = &[
    (
        "rate = ",
        "1: not TOML: string values must be quoted, expected literal string",
    ),
    ("[tenant.a]\n[tenant.a]", "2: not TOML: duplicate key"),
    (
        "wieght = 1",
        "1: no key wieght at the top: the keys are rate, strict_percent, tenant, default",
    ),
    (
        "\n[tennant.a]",
        "2: no key tennant at the top: did you mean tenant?",
    ),
    (
        "[tenant.a]\nuid = []\nwieght = 1",
        "3: no key wieght in [tenant.a]: did you mean weight?",
    ),
    (
        "[tenant.a]\nuid = []\nzzz = 1",
        "3: no key zzz in [tenant.a]: the keys are uid, cgroup, weight, rate, ceiling, classes, limits",
    ),
    (
        "[default]\nuid = [1]",
        "2: no key uid in [default]: the keys are refuse, weight, rate, ceiling, classes, limits",
    ),
    (
        "rate = 25",
        "1: rate = 25 at the top: give a rate such as \"10Gbit\": a number with kbit, Mbit, Gbit or Tbit, at least \"1kbit\"",
    ),
    (
        "[default]\nrate = \"1GB\"",
        "2: rate = \"1GB\" in [default]: give a rate such as \"10Gbit\": a number with kbit, Mbit, Gbit or Tbit, at least \"1kbit\"",
    ),
    (
        "[default]\nceiling = \"0Gbit\"",
        "2: ceiling = \"0Gbit\" in [default]: give a rate such as \"10Gbit\": a number with kbit, Mbit, Gbit or Tbit, at least \"1kbit\"",
    ),
    (
        "[default]\nrate = \"2Gbit\"\nceiling = \"1Gbit\"",
        "3: the ceiling in [default], 1 Gbit/s, is below the rate, 2 Gbit/s: raise it, or lower the rate",
    ),
    (
        "strict_percent = 0",
        "1: strict_percent = 0 at the top: give a number from 1 to 100",
    ),
    (
        "[tenant.a]\nuid = []\nweight = 0",
        "3: weight = 0 in [tenant.a]: give a number from 1 to 65535",
    ),
    (
        "[tenant.a]\nuid = []\nweight = \"3\"",
        "3: weight = \"3\" in [tenant.a]: give a number from 1 to 65535",
    ),
    (
        "[tenant.a]\nuid = []\nweight = 65536",
        "3: weight = 65536 in [tenant.a]: give a number from 1 to 65535",
    ),
    (
        "[tenant.a]\nuid = \"alice\"",
        "2: uid = \"alice\" in [tenant.a]: give a list of numbers and names of users, such as [1000, \"alice\"]",
    ),
    (
        "[tenant.a]\nuid = [\n  1,\n  -1]",
        "4: uid = -1 in [tenant.a]: give a list of numbers and names of users, such as [1000, \"alice\"]",
    ),
    (
        "[tenant.a]\nuid = [4294967295]",
        "2: uid = 4294967295 in [tenant.a]: give a list of numbers and names of users, such as [1000, \"alice\"]",
    ),
    (
        "[tenant.a]\nuid = [\"carol\"]",
        "2: uid \"carol\" in [tenant.a]: this host has no such user: give a user's name or number",
    ),
    (
        "[tenant.a]\nuid = [\"remote\"]",
        "2: uid \"remote\" in [tenant.a]: the system cannot look it up: timed out",
    ),
    (
        "[tenant.a]\nuid = [\"alice\"]\n[tenant.b]\nuid = [1000]",
        "4: uid 1000 in [tenant.b] is in [tenant.a] already, at line 2: remove one, as nobody is in two tenants",
    ),
    (
        "[tenant.a]\ncgroup = [\"db.service\"]",
        "2: cgroup = \"db.service\" in [tenant.a]: give a list of paths in the tree of control groups, such as [\"/system.slice/db.service\"]",
    ),
    (
        "[tenant.a]\ncgroup = [\"/a/../b\"]",
        "2: cgroup = \"/a/../b\" in [tenant.a]: give a list of paths in the tree of control groups, such as [\"/system.slice/db.service\"]",
    ),
    (
        "[tenant.a]\ncgroup = [\"/a\", \"/a/\"]",
        "2: cgroup /a in [tenant.a] is in [tenant.a] already, at line 2: remove one, as nobody is in two tenants",
    ),
    (
        "[tenant.a]\nuid = []\nclasses = [\"strict\"]",
        "3: classes = [\"strict\"] in [tenant.a]: give a table of classes, such as { 0 = 4, 7 = \"strict\" }",
    ),
    (
        "[default]\nclasses = { 8 = 1 }",
        "2: no key 8 in classes in [default]: the keys are 0, 1, 2, 3, 4, 5, 6, 7",
    ),
    (
        "[default.classes]\n7 = \"first\"",
        "2: 7 = \"first\" in classes in [default]: give a weight from 1 to 255, or \"strict\"",
    ),
    (
        "[default.classes]\n7 = 0",
        "2: 7 = 0 in classes in [default]: give a weight from 1 to 255, or \"strict\"",
    ),
    (
        "[default]\nlimits = 7",
        "2: limits = 7 in [default]: give a table of limits, such as { queue_pairs = 100 }",
    ),
    (
        "[default.limits]\nqueuepairs = 7",
        "2: no key queuepairs in limits in [default]: did you mean queue_pairs?",
    ),
    (
        "[default.limits]\nqueue_pairs = -7",
        "2: queue_pairs = -7 in limits in [default]: give a number from 0 on",
    ),
    (
        "[default.limits]\nbytes = \"64 Gbit\"",
        "2: bytes = \"64 Gbit\" in limits in [default]: give bytes, or a size with a binary unit such as \"64GiB\"",
    ),
    (
        "[default]\nrefuse = 1",
        "2: refuse = 1 in [default]: give true or false",
    ),
    (
        "[default]\nrefuse = true\nweight = 3",
        "3: weight in [default] beside refuse = true, which leaves nobody there: remove one of them",
    ),
    ("default = 7", "1: default = 7 at the top: give a table [default]"),
    (
        "tenant = 7",
        "1: tenant = 7 at the top: give tables such as [tenant.db]",
    ),
    ("tenant.a = 7", "1: tenant.a = 7: give tables such as [tenant.db]"),
    (
        "[tenant.default]\nuid = [1]",
        "1: the name default is that of the tenant of [default]: give another one",
    ),
    (
        "[tenant.\"a b\"]\nuid = [1]",
        "1: \"a b\" is no name of a tenant: give 1 to 64 letters, digits, '-', '_' or '.'",
    ),
];

#[test]
fn parse__each_error() {
    for (text, expected) in WRONG {
        assert_eq!(errors(text), [format!("{FILE}:{expected}")], "{text}");
    }
}

#[test]
fn parse__all_errors_in_the_order_of_lines() {
    let text =
        "strict_percent = 101\nrate = 1\n[tenant.b]\nuid = [\"carol\"]\nfoo = 1\n[tenant.a]\nweight = 0";
    let lines: Vec<String> = errors(text);
    let numbers: Vec<&str> = lines.iter().map(|line| line.split(':').nth(1).unwrap()).collect();
    assert_eq!(numbers, ["1", "2", "4", "5", "7"]);
    let summary = parse(text).unwrap_err().to_string();
    assert_eq!(
        summary,
        "node.toml:1: strict_percent = 101 at the top: give a number from 1 to 100 (4 more: `rdmux node check node.toml` lists them)"
    );
    let many: String = (0..=TENANTS_MAX).map(|n| format!("[tenant.t{n}]\n")).collect();
    assert_eq!(
        errors(&many),
        ["node.toml:1: 1025 tenants: a node has at most 1024"]
    );
}

#[test]
fn parse__warnings() {
    let warnings = |text: &str| -> Vec<String> {
        let (_, warnings) = parse(text).unwrap();
        warnings.iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        warnings(
            "rate = \"10Gbit\"\n[default]\nrate = \"6Gbit\"\n[tenant.a]\nuid = [1]\nrate = \"6Gbit\"\nceiling = \"11Gbit\""
        ),
        [
            "node.toml:1: the guaranteed rates are 12 Gbit/s together, more than the device's 10 Gbit/s: when all tenants send, they share it by weight",
            "node.toml:1: the ceiling of a, 11 Gbit/s, is more than the device's rate, 10 Gbit/s, so it limits nothing",
        ]
    );
    assert_eq!(
        warnings("\n[tenant.a]\nweight = 3"),
        ["node.toml:2: [tenant.a] has neither uid nor cgroup: nobody is in it"]
    );
    assert_eq!(
        warnings("[tenant.a]\nuid = [1]\nlimits.applications = 1025\n[default]\nlimits.applications = 1024"),
        ["node.toml:3: applications = 1025 in limits in [tenant.a]: a node has at most 1024 applications"]
    );
    assert!(
        warnings("rate = \"12Gbit\"\n[tenant.a]\nuid = [1]\nrate = \"12Gbit\"\nceiling = \"12Gbit\"")
            .is_empty()
    );
}

#[test]
fn parse__arbitrary_text() {
    // Each prefix of a file that has everything, and each with a byte changed, is read or refused.
    let whole = "rate = \"1Gbit\"\n[tenant.a]\nuid = [\"alice\", 7]\ncgroup = [\"/ä\"]\nclasses = { 0 = 1 }\nlimits.bytes = \"1G\"";
    for end in (0..whole.len()).filter(|end| whole.is_char_boundary(*end)) {
        let _ = parse(&whole[..end]);
        for other in ["\"", "[", "=", "\n", "9"] {
            let rest = whole[end..]
                .chars()
                .next()
                .map_or(end, |first| end + first.len_utf8());
            let _ = parse(&[&whole[..end], other, &whole[rest..]].concat());
        }
    }
}

#[test]
fn assign__most_specific_cgroup_then_uid_then_default() {
    let text = "[tenant.user]\nuid = [1000, 1001]\n[tenant.slice]\ncgroup = [\"/system.slice\"]\n\
         [tenant.service]\ncgroup = [\"/system.slice/db.service\", \"/other\"]\n";
    let assigned = |others: &str, uid, cgroup| {
        let config = config(&format!("{text}{others}"));
        match config.assign(uid, cgroup, 7) {
            Assignment::Tenant(at) => config.tenants[at].name.clone(),
            other => format!("{other:?}"),
        }
    };
    for (uid, cgroup, tenant) in [
        (Some(1000), None, "user"),
        (Some(1001), Some("/user.slice/user-1001.slice"), "user"),
        (Some(1000), Some("/system.slice/db.service"), "service"),
        (Some(1000), Some("/system.slice/db.service/worker"), "service"),
        (Some(1000), Some("/system.slice/db.service2"), "slice"),
        (Some(5), Some("/system.slice"), "slice"),
        (None, Some("/other/a/b"), "service"),
        (Some(1000), Some("/system.slices"), "user"),
        (Some(5), Some("/"), "Default"),
        (None, None, "Default"),
    ] {
        assert_eq!(assigned("[default]", uid, cgroup), tenant, "{uid:?} {cgroup:?}");
    }
    // Without [default] only the node's user, 7 here, matches nothing and is served.
    assert_eq!(assigned("", Some(7), None), "Default");
    assert_eq!(assigned("", Some(5), None), "Refused");
    assert_eq!(assigned("", None, None), "Refused");
    assert_eq!(assigned("[default]\nrefuse = true", Some(7), None), "Refused");
}

#[test]
fn assign__root_of_the_cgroups_is_everybody() {
    let config = config("[tenant.all]\ncgroup = [\"/\"]\n[tenant.a]\ncgroup = [\"/a\"]");
    assert_eq!(config.assign(None, Some("/b"), 7), Assignment::Tenant(0));
    assert_eq!(config.assign(None, Some("/"), 7), Assignment::Tenant(0));
    assert_eq!(config.assign(None, Some("/a/b"), 7), Assignment::Tenant(1));
}

#[test]
fn serves_others__each_reason() {
    for (text, serves) in [
        ("", false),
        ("[default]\nrefuse = true", false),
        ("[tenant.a]\nuid = [7]", false),
        ("[tenant.a]\nuid = [7, 8]", true),
        ("[tenant.a]\ncgroup = [\"/a\"]", true),
        ("[default]", true),
    ] {
        assert_eq!(config(text).serves_others(7), serves, "{text}");
    }
}

#[test]
fn rate_text__each_unit() {
    let texts = [1, 1_000, 2_500_000, 25_000_000_000, 1_000_000_000_000].map(rate_text);
    assert_eq!(
        texts,
        ["1 bit/s", "1 kbit/s", "2.5 Mbit/s", "25 Gbit/s", "1 Tbit/s"]
    );
}
