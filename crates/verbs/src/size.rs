//! Sizes as people write them: `4096`, `64K`, `1M`, `2G`, `1T`, with binary units.

/// Returns the bytes of a size; `None` if the text is not a size, or the size does not fit 64 bits.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_size__each_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 64 << 10),
            ("64k", 64 << 10),
            ("3MiB", 3 << 20),
            ("2G", 2 << 30),
            ("1T", 1 << 40),
            ("7b", 7),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn parse_size__what_is_none() {
        for text in [
            "",
            "K",
            "1.5G",
            "-1",
            "+1",
            "1X",
            "1KK",
            "99999999999999999999",
            "18446744073709551615K",
            "１",
        ] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
