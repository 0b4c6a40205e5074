//! USDT probes: with the feature the program has those of docs/probes.md, with as many arguments; without it, none.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::collections::BTreeMap;

/// Returns the name and the number of arguments of each probe of the program, from its notes of SystemTap's kind.
fn probes() -> BTreeMap<String, usize> {
    const OWNER: &[u8] = b"stapsdt\0";
    let program = std::fs::read(env!("CARGO_BIN_EXE_rdmux")).unwrap();
    let mut found = BTreeMap::new();
    for at in (12..program.len() - OWNER.len()).step_by(4) {
        let word = |at: usize| u32::from_le_bytes(program[at..at + 4].try_into().unwrap());
        // A note: lengths of owner and description, its type, the owner, the description.
        if &program[at..at + OWNER.len()] != OWNER || word(at - 12) != 8 || word(at - 4) != 3 {
            continue;
        }
        let description = &program[at + OWNER.len()..][..word(at - 8) as usize];
        // Three addresses, then provider, name and arguments.
        let texts: Vec<&str> = description[24..]
            .split(|byte| *byte == 0)
            .map(|text| std::str::from_utf8(text).unwrap())
            .collect();
        assert_eq!(texts[0], "rdmux");
        let arguments = texts[2].split_whitespace().count();
        let before = found.insert(texts[1].to_owned(), arguments);
        // A probe that stands in several places counts once.
        assert!(before.is_none_or(|before| before == arguments), "{}", texts[1]);
    }
    found
}

#[cfg(feature = "probes")]
#[test]
fn probes__are_those_of_the_documentation() {
    let table = include_str!("../../../docs/probes.md")
        .lines()
        .filter(|line| line.starts_with("| `"));
    let documented: BTreeMap<String, usize> = table
        .map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            (cells[1].trim_matches('`').to_owned(), cells[2].split(',').count())
        })
        .collect();
    assert_eq!(probes(), documented);
}

#[cfg(not(feature = "probes"))]
#[test]
fn probes__are_none_without_the_feature() {
    assert_eq!(probes(), BTreeMap::new());
}
