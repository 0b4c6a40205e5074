//! `rdmux doctor ddio` and `rdmux ddio` on a folder that stands for a host: its sysfs, configuration spaces, processor.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod host;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::Value;

use self::host::{Host, ROOT_PORT, SKYLAKE, skylake};

const ICE_LAKE: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\n\
                        model name\t: Intel(R) Xeon(R) Gold 6338\nstepping\t: 6\n";

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn doctor__shows_what_is_set() {
    let host = skylake(0x99);
    let output = host.rdmux(&["doctor", "ddio"]);
    let out = text(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    for word in ["mlx5_0", "mlx5_1", "DDIO on", ROOT_PORT, "Skylake-SP", "0x99"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    assert!(out.contains("use_allocating_flow_wr 1, nosnoopopwren 1"), "{out}");
    assert!(out.contains("rdmux ddio off mlx5_0"), "what to do: {out}");

    let output = skylake(0x11).rdmux(&["doctor", "ddio", "--json"]);
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    let first = &list[0];
    assert_eq!(
        (&first["check"], &first["subject"], &first["verdict"]),
        (&"ddio".into(), &"mlx5_0".into(), &"ok".into())
    );
    let details = &first["details"];
    assert_eq!(details["ddio"], "off");
    assert_eq!(details["byte"], 0x11);
    assert_eq!(details["use_allocating_flow_wr"], false);
    assert_eq!(details["root_port"]["address"], ROOT_PORT);
    assert_eq!(
        details["behind"],
        serde_json::json!(["0000:19:00.0", "0000:19:00.1"])
    );
}

#[test]
fn doctor__without_an_rdma_device() {
    let root = tempfile::tempdir().unwrap();
    let host = Host { root };
    let output = host.rdmux(&["doctor", "ddio"]);
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stdout).contains("no RDMA device"), "{output:?}");
}

#[test]
fn doctor__software_device() {
    let host = skylake(0x99);
    fs::create_dir_all(host.at("sys/class/infiniband/rxe0")).unwrap();
    let output = host.rdmux(&["doctor", "ddio"]);
    assert!(output.status.success(), "{output:?}");
    let out = text(&output.stdout);
    assert!(out.contains("rxe0") && out.contains("a software device"), "{out}");
}

#[test]
fn doctor__unknown_port_or_processor_is_told_and_not_read() {
    for (cpuinfo, port, why) in [
        (SKYLAKE, ("0x1b36", "0x000c"), "1b36:000c"),
        (ICE_LAKE, ("0x8086", "0x347a"), "8086:347a"),
        (ICE_LAKE, ("0x8086", "0x2030"), "Gold 6338"),
        ("", ("0x8086", "0x2030"), "unknown processor"),
    ] {
        let host = Host::new(cpuinfo, port, 0x99);
        let output = host.rdmux(&["doctor", "ddio"]);
        assert!(!output.status.success(), "{output:?}");
        let out = text(&output.stdout);
        assert!(out.contains("unknown") && out.contains(why), "{why}: {out}");
        assert!(!out.contains("0x99"), "{out}");
        for switch in ["off", "on"] {
            let output = host.rdmux(&["ddio", switch, "mlx5_0"]);
            assert!(!output.status.success());
            let error = text(&output.stderr);
            assert!(
                error.contains(why) && error.contains("Skylake-SP and Cascade Lake"),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
            assert_eq!(host.changed(), [(0x180, 0x99)], "nothing is written");
        }
    }
}

#[test]
fn doctor__device_on_the_root_bus() {
    let host = skylake(0x99);
    host.add(
        "sys/devices/pci0000:00/0000:00:05.0",
        ("0x15b3", "0x101e"),
        "0x020700",
        &[0; 4096],
    );
    host.rdma("mlx5_7", "sys/devices/pci0000:00/0000:00:05.0");
    let output = host.rdmux(&["doctor", "ddio"]);
    assert!(!output.status.success(), "{output:?}");
    let out = text(&output.stdout);
    assert!(
        out.contains("no root port above 0000:00:05.0") && out.contains("virtual machine"),
        "{out}"
    );
}

/// A user sees 64 bytes of a configuration space, and may not write it.
#[test]
fn doctor__without_rights() {
    let host = skylake(0x99);
    fs::write(host.config(), [0x5a; 64]).unwrap();
    let output = host.rdmux(&["doctor", "ddio"]);
    assert!(!output.status.success(), "{output:?}");
    let out = text(&output.stdout);
    let is_root = rustix::process::geteuid().is_root();
    let why = if is_root {
        "no extended configuration space"
    } else {
        "only root may read"
    };
    assert!(out.contains(why), "{out}");
    if is_root {
        return;
    }
    fs::set_permissions(host.config(), fs::Permissions::from_mode(0o444)).unwrap();
    let output = host.rdmux(&["ddio", "off", "mlx5_0"]);
    assert!(!output.status.success(), "{output:?}");
    let error = text(&output.stderr);
    assert!(error.contains("only root may change"), "{error}");
}

#[test]
fn ddio__off_and_on_again() {
    let host = skylake(0x99);
    let output = host.rdmux(&["ddio", "off", "mlx5_1"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(host.changed(), [(0x180, 0x11)], "two bits of one byte");
    let out = text(&output.stdout);
    for word in ["0x99 -> 0x11", "0000:19:00.0, 0000:19:00.1", ROOT_PORT] {
        assert!(out.contains(word), "{word}: {out}");
    }
    let error = text(&output.stderr);
    assert!(
        error.contains("Skylake-SP and Cascade Lake") && error.contains("every device behind"),
        "{error}"
    );

    // A second `off` changes nothing, and keeps the value that was set before the first.
    let output = host.rdmux(&["ddio", "off", "0000:19:00.0", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&value["before"], &value["after"]), (&0x11.into(), &0x11.into()));
    assert!(output.stderr.is_empty(), "{output:?}");

    let output = host.rdmux(&["ddio", "on", ROOT_PORT]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(host.changed(), [(0x180, 0x99)], "as it was");
    let output = host.rdmux(&["ddio", "on", "mlx5_0"]);
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stdout).contains("0x99, unchanged"), "{output:?}");
}

#[test]
fn ddio__other_bits_stay() {
    let host = skylake(0xd1);
    assert!(host.rdmux(&["ddio", "off", "mlx5_0"]).status.success());
    assert_eq!(host.changed(), [(0x180, 0x51)]);
    assert!(host.rdmux(&["ddio", "on", "mlx5_0"]).status.success());
    assert_eq!(host.changed(), [(0x180, 0xd1)]);
}

/// The firmware has switched it off, except for no-snoop writes: `off` clears that bit too, and `on` switches it on.
#[test]
fn ddio__half_off() {
    let host = skylake(0x19);
    let output = host.rdmux(&["ddio", "off", "mlx5_0"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(host.changed(), [(0x180, 0x11)]);
    assert!(host.rdmux(&["ddio", "on", "mlx5_0"]).status.success());
    assert_eq!(host.changed(), [(0x180, 0x99)]);
}

#[test]
fn ddio__a_port_that_does_not_take_it() {
    let host = skylake(0x99);
    // Writes have no effect, and reads always return the same.
    fs::remove_file(host.config()).unwrap();
    symlink("/dev/zero", host.config()).unwrap();
    let output = host.rdmux(&["ddio", "on", "mlx5_0"]);
    assert!(!output.status.success(), "{output:?}");
    let error = text(&output.stderr);
    assert!(error.contains("did not accept the setting"), "{error}");
}

#[test]
fn ddio__names_that_are_none() {
    let host = skylake(0x99);
    for name in ["mlx5_9", "0000:99:00.0", "../mlx5_0", "", "/"] {
        let output = host.rdmux(&["ddio", "off", name]);
        assert!(!output.status.success(), "{name}");
        let error = text(&output.stderr);
        assert!(
            error.contains("no device") || error.contains("neither an RDMA device"),
            "{name}: {error}"
        );
    }
    assert_eq!(host.changed(), [(0x180, 0x99)]);
}

#[test]
fn ddio__silent_port() {
    let host = skylake(0xff);
    let output = host.rdmux(&["ddio", "off", "mlx5_0"]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("does not answer"), "{output:?}");
}
