//! `rdmux node --web`: a page that shows the node, and the snapshots that it asks for.
//!
//! The node's key gives access to the page: by a *token*, a proof of the key, which the browser keeps and sends in a header. It is in no URL that
//! is sent, and so in no log. The page's own files have no secrets and need none.

use std::borrow::Cow;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rdmux_push::Key;

use crate::http::{self, Answer, Request, TEXT};
use crate::output;
use crate::recent::Recent;

/// Port of the page where only an address is given.
const PORT_DEFAULT: u16 = 7175;
/// The text of which the token is a proof.
const LABEL: &[u8] = b"rdmux node page, version 1";
/// Time that a client has for sending its request and taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Headers of all answers. The page loads only what is here, is in no other page, and sends no form.
const GUARDED: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                       base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: \
                       no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n";
/// Headers of a refusal.
const REFUSED: &str = "WWW-Authenticate: Bearer\r\n";

/// Files of the page: path, type, bytes.
const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("web/page.html")),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("web/page.css"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("web/page.js"),
    ),
];

/// Parses the address of a page.
pub(super) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let address = http::parse_address(text, PORT_DEFAULT)?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(format!(
            "the page is for this host, since its token would cross the network in the clear: from another one use ssh -L \
             {0}:127.0.0.1:{0}",
            address.port()
        )),
    }
}

/// Returns the page's URL with the token, which a browser does not send.
pub(super) fn url(address: SocketAddr, key: &Key) -> String {
    let token = key.proof(&[LABEL]);
    let hex: String = token.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("http://{address}/#{hex}")
}

/// Warns if no process has the address of a page.
pub(super) fn warn_if_nobody_listens(address: SocketAddr) {
    if let Err(error) = TcpStream::connect_timeout(&address, PATIENCE) {
        let warning = format!("warning: no node has its page at {address} (`rdmux node --web {address}`)");
        output::error(&anyhow::Error::new(error).context(warning));
    }
}

/// Serves the page until the process ends; returns its address.
pub(super) fn serve(address: SocketAddr, key: Key, recent: Arc<Recent>) -> Result<SocketAddr> {
    let cannot = || format!("cannot serve the page at {address} (choose another port with --web ADDR:PORT)");
    let listener = TcpListener::bind(address).with_context(cannot)?;
    let at = listener.local_addr().with_context(cannot)?;
    let snapshot = move || serde_json::to_string(&*recent.snapshot()?).ok();
    let handle = move |request: &Request<'_>| answer(request, &key, &snapshot);
    http::serve(listener, "rdmux-web", PATIENCE, handle).with_context(cannot)?;
    Ok(at)
}

fn answer(request: &Request<'_>, key: &Key, snapshot: impl FnOnce() -> Option<String>) -> Answer {
    let guarded = |status, content_type, body| Answer {
        status,
        content_type,
        headers: GUARDED,
        body,
    };
    if let Some((_, content_type, text)) = FILES.iter().find(|(path, ..)| *path == request.path) {
        return guarded("200 OK", *content_type, Cow::Borrowed(*text));
    }
    if request.path != "/snapshot.json" {
        return guarded("404 Not Found", TEXT, "the page is at /\n".into());
    }
    if !has_token(request, key) {
        return Answer {
            headers: REFUSED,
            ..Answer::text(
                "401 Unauthorized",
                "the token is missing or wrong: rdmux node url\n",
            )
        };
    }
    match snapshot() {
        Some(json) => guarded("200 OK", "application/json", json.into()),
        None => guarded("503 Service Unavailable", TEXT, "the node has ended\n".into()),
    }
}

/// Returns whether a request has the token.
fn has_token(request: &Request<'_>, key: &Key) -> bool {
    let hex = request
        .authorization
        .and_then(|value| value.strip_prefix("Bearer "));
    let token = hex.and_then(|hex| parse_token(hex.as_bytes()));
    token.is_some_and(|token| key.verify(&[LABEL], &token))
}

fn parse_token(hex: &[u8]) -> Option<[u8; 32]> {
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let mut token = [0; 32];
    let (pairs, []) = hex.as_chunks::<2>() else {
        return None;
    };
    if pairs.len() != token.len() {
        return None;
    }
    for (byte, [high, low]) in token.iter_mut().zip(pairs) {
        *byte = (digit(*high)? << 4 | digit(*low)?) as u8;
    }
    Some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(path: &str, authorization: Option<&str>) -> Answer {
        let request = Request { path, authorization };
        answer(&request, &Key::new([7; 32]), || Some("{}".into()))
    }

    #[test]
    fn answer__by_path() {
        for (path, status, start) in [
            ("/", "200 OK", "<!doctype html>"),
            ("/page.css", "200 OK", ":root"),
            ("/page.js", "200 OK", "//"),
            ("/page.html", "404 Not Found", "the page is at /"),
            ("/../key", "404 Not Found", "the page is at /"),
        ] {
            let answer = ask(path, None);
            assert_eq!(answer.status, status, "{path}");
            assert!(answer.body.starts_with(start), "{path}");
            assert!(answer.headers.contains("default-src 'none'"), "{path}");
        }
    }

    #[test]
    fn answer__a_snapshot_only_with_the_token() {
        let url = url("127.0.0.1:7175".parse().unwrap(), &Key::new([7; 32]));
        let token = url.strip_prefix("http://127.0.0.1:7175/#").unwrap();
        let (bearer, upper) = (
            format!("Bearer {token}"),
            format!("Bearer {}", token.to_uppercase()),
        );
        for right in [bearer.as_str(), &upper] {
            let answer = ask("/snapshot.json", Some(right));
            assert_eq!((answer.status, answer.body.as_ref()), ("200 OK", "{}"), "{right}");
        }
        let last = if token.ends_with('0') { "1" } else { "0" };
        let wrong = [
            format!("Bearer {}{last}", &token[..63]),
            format!("Bearer {}", &token[..62]),
            format!("{bearer}00"),
            format!("Bearer  {token}"),
            token.into(),
            "Bearer \u{fc}".into(),
            "Bearer ".into(),
            String::new(),
        ];
        for wrong in wrong.iter().map(|text| Some(text.as_str())).chain([None]) {
            let answer = ask("/snapshot.json", wrong);
            assert_eq!(answer.status, "401 Unauthorized", "{wrong:?}");
            assert!(!answer.body.contains('{'), "{wrong:?}");
        }
    }

    #[test]
    fn answer__when_the_node_has_ended() {
        let key = Key::new([7; 32]);
        let url = url("127.0.0.1:1".parse().unwrap(), &key);
        let bearer = format!("Bearer {}", url.split_once('#').unwrap().1);
        let request = Request {
            path: "/snapshot.json",
            authorization: Some(&bearer),
        };
        assert_eq!(answer(&request, &key, || None).status, "503 Service Unavailable");
    }

    #[test]
    fn parse_address__of_this_host_alone() {
        for (text, address) in [
            ("7200", "127.0.0.1:7200"),
            ("127.0.0.2", "127.0.0.2:7175"),
            ("[::1]:0", "[::1]:0"),
        ] {
            assert_eq!(parse_address(text), Ok(address.parse().unwrap()), "{text}");
        }
        assert!(
            parse_address("0.0.0.0")
                .unwrap_err()
                .contains("ssh -L 7175:127.0.0.1:7175")
        );
        assert!(parse_address("192.0.2.1:80").is_err());
    }
}
