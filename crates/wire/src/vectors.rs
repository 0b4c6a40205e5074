//! Packets for tests, built by scapy 2.8.0 (`scapy.contrib.roce`): the ICRCs are those of an independent implementation.

use rdmux_wire::roce::icrc::Flow;

/// A packet and the parameters of its ICRC.
pub(crate) struct Vector {
    pub(crate) name: &'static str,
    pub(crate) flow: Flow,
    pub(crate) ip_id: u16,
    pub(crate) packet: Vec<u8>,
}

fn vector(name: &'static str, v6: bool, ip_id: u16, hex: &str) -> Vector {
    let packet = (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect();
    let (src, dst) = if v6 {
        ("fd00::1", "fd00::2")
    } else {
        ("10.9.0.1", "10.9.0.2")
    };
    let flow = Flow {
        src: src.parse().unwrap(),
        dst: dst.parse().unwrap(),
        src_port: 0xc123,
        dst_port: 4791,
    };
    Vector {
        name,
        flow,
        ip_id,
        packet,
    }
}

/// Returns the packet named `name`.
pub(crate) fn packet(name: &str) -> Vec<u8> {
    all().into_iter().find(|v| v.name == name).unwrap().packet
}

/// Returns all packets: destination QPN 0x12abcd (QPN 1 in UD), PSN 0xfedcba, M set.
pub(crate) fn all() -> Vec<Vector> {
    vec![
        vector(
            "SEND only imm",
            false,
            0x0,
            "05f0ffff0012abcd80fedcbadeadbeef3031323334000000beea5213",
        ),
        vector(
            "SEND only, FECN and BECN",
            false,
            0x0,
            "0440ffffc012abcd00fedcba6e1a8693",
        ),
        vector(
            "SEND last invalidate",
            false,
            0x0,
            "1640ffff0012abcd00fedcba11223344303132333c322271",
        ),
        vector(
            "WRITE only",
            false,
            0x0,
            "0a50ffff0012abcd80fedcba00007f1234567000cafe010200001000303132333435363738393a000400d5c3",
        ),
        vector(
            "WRITE only, id 3",
            false,
            0x3,
            "0a50ffff0012abcd80fedcba00007f1234567000cafe010200001000303132333435363738393a0060bf0032",
        ),
        vector(
            "WRITE only, v6",
            true,
            0x0,
            "0a50ffff0012abcd80fedcba00007f1234567000cafe010200001000303132333435363738393a00df3aadfd",
        ),
        vector(
            "WRITE only imm",
            false,
            0x0,
            "0b40ffff0012abcd00fedcba00007f1234567000cafe010200001000010203043031323334353637963b590f",
        ),
        vector(
            "READ request",
            false,
            0x0,
            "0c40ffff0012abcd80fedcba00007f1234567000cafe0102000010009fbe5436",
        ),
        vector(
            "READ response first",
            false,
            0x0,
            "0d40ffff0012abcd00fedcba1f00000930313233343536379ab05bae",
        ),
        vector("ACK", false, 0x0, "1140ffff0012abcd00fedcba1f00002ade0e3128"),
        vector(
            "RNR NAK, v6",
            true,
            0x0,
            "1140ffff0012abcd00fedcba2e00002abf371b12",
        ),
        vector(
            "ATOMIC ACK",
            false,
            0x0,
            "1240ffff0012abcd00fedcba1f0001008877665544332211d0d2f041",
        ),
        vector(
            "CAS",
            false,
            0x0,
            "1340ffff0012abcd00fedcba00007f1234567008cafe01020000000000001111000000000000222290cd38fe",
        ),
        vector(
            "FLUSH",
            false,
            0x0,
            "1c40ffff0012abcd80fedcba0000001200007f1234567000cafe0102000010003075d384",
        ),
        vector(
            "ATOMIC WRITE",
            true,
            0x0,
            "1d40ffff0012abcd80fedcba00007f1234567008cafe0102000000080001020304050607fed4050d",
        ),
        vector(
            "UD SEND only",
            false,
            0x0,
            "6440ffff0000000100fedcba8001000000000001303132331ec121bf",
        ),
        vector(
            "XRC WRITE only",
            false,
            0x0,
            "aa40ffff0012abcd00fedcba0000077700007f1234567000cafe0102000010003031323336ff5ba4",
        ),
        vector(
            "UC SEND only, id 0xbeef",
            false,
            0xbeef,
            "2440ffff0012abcd00fedcba303132331d415b10",
        ),
    ]
}
