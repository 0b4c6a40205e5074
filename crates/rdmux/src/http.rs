//! The part of HTTP/1.1 that a scraper and a page need: one thread, a bounded number of connections, each for one request and a bounded time.
//! No client makes others wait: at the limit, the server closes the connection that has been open longest.

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum number of open connections.
const CONNECTIONS_MAX: usize = 16;
/// Maximum number of bytes of a request.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Maximum number of bytes that a client may still send after the answer.
const AFTER_BYTES_MAX: usize = 64 << 10;
/// Time without accepting connections after the process ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A request, by GET or HEAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    /// Path of the target, without the query.
    pub(crate) path: &'a str,
    /// Value of the header `Authorization`.
    pub(crate) authorization: Option<&'a str>,
}

/// Answer to a request.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// Code and reason, such as `200 OK`.
    pub(crate) status: &'static str,
    pub(crate) content_type: &'static str,
    /// Further headers, each with its line's end.
    pub(crate) headers: &'static str,
    pub(crate) body: Cow<'static, str>,
}

/// Type of plain text.
pub(crate) const TEXT: &str = "text/plain; charset=utf-8";

impl Answer {
    /// Returns a line of text.
    pub(crate) fn text(status: &'static str, body: &'static str) -> Answer {
        Answer {
            status,
            content_type: TEXT,
            headers: "",
            body: body.into(),
        }
    }

    fn bytes(&self, with_body: bool) -> Vec<u8> {
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}Cache-Control: no-store\r\nConnection: close\r\n\r\n",
            self.status,
            self.content_type,
            self.body.len(),
            self.headers
        );
        let body = if with_body { self.body.as_bytes() } else { b"" };
        [head.as_bytes(), body].concat()
    }
}

/// Parses `ADDR`, `ADDR:PORT` or `PORT`, which is on the loopback interface; port 0 stands for any free port.
pub(crate) fn parse_address(text: &str, port: u16) -> Result<SocketAddr, String> {
    let numeric = match text.strip_prefix("localhost") {
        Some(rest) if rest.is_empty() || rest.starts_with(':') => format!("127.0.0.1{rest}"),
        _ => text.to_owned(),
    };
    let bare = numeric
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(&numeric);
    let only_address = bare.parse().map(|address| SocketAddr::new(address, port));
    let only_port = text
        .parse()
        .map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
    let address: SocketAddr = numeric
        .parse()
        .or(only_address)
        .or(only_port)
        .map_err(|_| "give ADDR, ADDR:PORT (an IPv6 address in brackets) or PORT".to_owned())?;
    if address.ip().is_multicast() {
        return Err(format!("{} is not an address of this host", address.ip()));
    }
    Ok(address)
}

/// Answers requests by `handle`, until the process ends, in a thread of this name. A client has `patience` from its connection to its end.
pub(crate) fn serve(
    listener: TcpListener,
    thread: &str,
    patience: Duration,
    handle: impl Fn(&Request<'_>) -> Answer + Send + 'static,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let server = Server {
        listener,
        patience,
        handle,
        connections: Vec::new(),
        accepts_from: None,
    };
    thread::Builder::new()
        .name(thread.into())
        .spawn(move || server.run())
        .map(drop)
}

struct Server<F> {
    listener: TcpListener,
    patience: Duration,
    handle: F,
    /// Open connections, oldest first.
    connections: Vec<Connection>,
    /// Time at which the server accepts connections again.
    accepts_from: Option<Instant>,
}

struct Connection {
    stream: TcpStream,
    until: Instant,
    state: State,
}

enum State {
    /// The bytes of the request received so far.
    Reading(Vec<u8>),
    /// The answer and the number of its bytes sent so far.
    Writing(Vec<u8>, usize),
    /// The answer is sent. Further input is read and discarded: a connection closed with unread bytes would be reset before the client has
    /// the answer.
    Ending(usize),
}

impl<F: Fn(&Request<'_>) -> Answer> Server<F> {
    fn run(mut self) {
        loop {
            // Only a bad descriptor or a lack of memory fails here.
            if self.wait().is_err() {
                // No event reports free memory, and an immediate retry would spin.
                thread::sleep(ACCEPT_PAUSE);
            }
            self.accept();
            let (now, handle) = (Instant::now(), &self.handle);
            self.connections.retain_mut(|connection| {
                connection.until > now && connection.advance(handle).unwrap_or(false)
            });
        }
    }

    /// Sleeps until a connection or the listener is ready, or a time limit expires.
    fn wait(&self) -> io::Result<()> {
        let mut fds = Vec::with_capacity(1 + CONNECTIONS_MAX);
        if self.accepts_from.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        for connection in &self.connections {
            let flags = match connection.state {
                State::Writing(..) => PollFlags::OUT,
                State::Reading(_) | State::Ending(_) => PollFlags::IN,
            };
            fds.push(PollFd::new(&connection.stream, flags));
        }
        let deadlines = self.connections.iter().map(|connection| connection.until);
        let next = deadlines.chain(self.accepts_from).min();
        let timeout = next.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn accept(&mut self) {
        let now = Instant::now();
        if self.accepts_from.is_some_and(|from| from > now) {
            return;
        }
        self.accepts_from = None;
        // Bounded, so that open connections get their turn.
        for _ in 0..CONNECTIONS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    if self.connections.len() == CONNECTIONS_MAX {
                        self.connections.remove(0);
                    }
                    let mut connection = Connection {
                        stream,
                        until: now + self.patience,
                        state: State::Reading(Vec::new()),
                    };
                    // Most clients have already sent their request and take the answer at once.
                    if connection.advance(&self.handle).unwrap_or(false) {
                        self.connections.push(connection);
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
                    _ => {
                        self.accepts_from = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                },
            }
        }
    }
}

impl Connection {
    /// Proceeds as far as possible without waiting. Returns false when the connection has ended.
    fn advance(&mut self, handle: &impl Fn(&Request<'_>) -> Answer) -> io::Result<bool> {
        loop {
            match self.step(handle) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(true),
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
    }

    /// Makes one read or write. Returns false when the connection has ended.
    fn step(&mut self, handle: &impl Fn(&Request<'_>) -> Answer) -> io::Result<bool> {
        let mut bytes = [0; 4096];
        match &mut self.state {
            State::Reading(request) => {
                let n = self.stream.read(&mut bytes)?;
                request.extend_from_slice(&bytes[..n]);
                if let Some(answer) = answer_to(request, handle) {
                    self.state = State::Writing(answer, 0);
                } else if n == 0 {
                    return Ok(false);
                }
            }
            State::Writing(answer, sent) => {
                *sent += self.stream.write(&answer[*sent..])?;
                if *sent == answer.len() {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.state = State::Ending(0);
                }
            }
            State::Ending(read) => {
                let n = self.stream.read(&mut bytes)?;
                *read += n;
                if n == 0 || *read > AFTER_BYTES_MAX {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

/// Returns the answer once the request is complete.
fn answer_to(request: &[u8], handle: impl FnOnce(&Request<'_>) -> Answer) -> Option<Vec<u8>> {
    if !is_whole(request) {
        let long = Answer::text("431 Request Header Fields Too Large", "request too long\n");
        return (request.len() >= REQUEST_BYTES_MAX).then(|| long.bytes(true));
    }
    let bad = |why| Some(Answer::text("400 Bad Request", why).bytes(true));
    let mut lines = request.split(|byte| *byte == b'\n').map(|line| {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        std::str::from_utf8(line)
    });
    let Some(Ok(line)) = lines.next() else {
        return bad("request is not text\n");
    };
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words[..] else {
        return bad("request has no method, target and version\n");
    };
    if !version.starts_with("HTTP/1.") {
        return bad("only HTTP/1.1 is supported\n");
    }
    // A proxy may name the host as well.
    let target = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    let with_body = match method {
        "GET" => true,
        "HEAD" => false,
        _ => {
            let mut other = Answer::text("405 Method Not Allowed", "only GET and HEAD are supported\n");
            other.headers = "Allow: GET, HEAD\r\n";
            return Some(other.bytes(true));
        }
    };
    let headers = lines.map_while(|line| line.ok().filter(|line| !line.is_empty()));
    let mut pairs = headers.filter_map(|line| line.split_once(':'));
    let authorization = pairs.find(|(name, _)| name.eq_ignore_ascii_case("authorization"));
    let request = Request {
        path: target.split('?').next().unwrap_or_default(),
        authorization: authorization.map(|(_, value)| value.trim()),
    };
    Some(handle(&request).bytes(with_body))
}

/// Returns whether the request ends with an empty line; bytes behind that line are not checked.
fn is_whole(request: &[u8]) -> bool {
    let ends = |at: usize| request[at..].starts_with(b"\r\n") || request[at..].starts_with(b"\n");
    (1..request.len()).any(|at| request[at - 1] == b'\n' && ends(at))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A time longer than any of these tests takes.
    const LONG: Duration = Duration::from_secs(60);

    /// Starts a server that answers with `bytes` bytes; returns its address and the count of its answers.
    fn start(bytes: usize, patience: Duration) -> (SocketAddr, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let rendered: Arc<AtomicUsize> = Arc::default();
        let counter = rendered.clone();
        let handle = move |request: &Request<'_>| {
            if request.path != "/metrics" {
                return Answer::text("404 Not Found", "metrics are at /metrics\n");
            }
            counter.fetch_add(1, Ordering::Relaxed);
            Answer {
                body: "x".repeat(bytes).into(),
                ..Answer::text("200 OK", "")
            }
        };
        serve(listener, "http", patience, handle).unwrap();
        (address, rendered)
    }

    fn connect(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// Sends these bytes; returns everything that the server sends until it closes the connection.
    fn ask(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = connect(address);
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    }

    const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

    #[test]
    fn answers__each_kind_of_request() {
        let (address, rendered) = start(5, LONG);
        for (request, status, body) in [
            (GET, "200 OK", "xxxxx"),
            (b"GET /metrics?a=b HTTP/1.0\n\n", "200 OK", "xxxxx"),
            (b"GET http://h/metrics HTTP/1.1\r\n\r\n", "200 OK", "xxxxx"),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK", ""),
            (
                b"GET / HTTP/1.1\r\n\r\n",
                "404 Not Found",
                "metrics are at /metrics\n",
            ),
            (
                b"POST /metrics HTTP/1.1\r\n\r\n",
                "405 Method Not Allowed",
                "only GET and HEAD are supported\n",
            ),
            (
                b"GET /metrics HTTP/2\r\n\r\n",
                "400 Bad Request",
                "only HTTP/1.1 is supported\n",
            ),
            (
                b"GET /metrics\r\n\r\n",
                "400 Bad Request",
                "request has no method, target and version\n",
            ),
            (
                b"\r\n\r\n",
                "400 Bad Request",
                "request has no method, target and version\n",
            ),
            (
                b"\xff / HTTP/1.1\r\n\r\n",
                "400 Bad Request",
                "request is not text\n",
            ),
        ] {
            let answer = ask(address, request);
            let said = String::from_utf8_lossy(request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}\r\n")),
                "{said}: {answer}"
            );
            assert_eq!(answer.split_once("\r\n\r\n").unwrap().1, body, "{said}");
        }
        assert_eq!(rendered.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn answer_to__passes_the_path_and_the_authorization_on() {
        for (request, path, authorization) in [
            ("GET /a?b HTTP/1.1\r\n\r\n", "/a", None),
            (
                "GET / HTTP/1.1\r\nHost: x\r\naUTHORIZATION:  Bearer 12 \r\n\r\n",
                "/",
                Some("Bearer 12"),
            ),
            (
                "GET / HTTP/1.1\nAuthorization:\nAuthorization: 2\n\n",
                "/",
                Some(""),
            ),
            (
                "GET / HTTP/1.1\r\nAuthorization\r\n\r\nAuthorization: body\r\n",
                "/",
                None,
            ),
        ] {
            let answer = answer_to(request.as_bytes(), |found| {
                assert_eq!(
                    (found.path, found.authorization),
                    (path, authorization),
                    "{request}"
                );
                Answer::text("200 OK", "yes")
            });
            assert!(answer.unwrap().ends_with(b"\r\n\r\nyes"), "{request}");
        }
    }

    #[test]
    fn answers__in_pieces() {
        let (address, _) = start(5, LONG);
        let mut stream = connect(address);
        for byte in GET {
            stream.write_all(&[*byte]).unwrap();
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("xxxxx"), "{answer}");
    }

    #[test]
    fn answers__a_request_without_end() {
        let (address, rendered) = start(5, LONG);
        let answer = ask(address, &[b'a'; REQUEST_BYTES_MAX + 100]);
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
        assert_eq!(rendered.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn answers__whatever_comes() {
        const PARTS: [&[u8]; 13] = [
            b"GET ",
            b"HEAD ",
            b"/metrics",
            b"http://",
            b" HTTP/1.1",
            b"\r\n",
            b"\n",
            b"\r",
            b"\0",
            b"\xff\xfe",
            b"?",
            b" ",
            b":",
        ];
        let (address, _) = start(5, LONG);
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let seed = since.as_nanos() as u64 | 1;
        println!("seed {seed}");
        let mut state = seed;
        let mut draw = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        for _ in 0..300 {
            let request: Vec<&[u8]> = (0..draw(14)).map(|_| PARTS[draw(PARTS.len())]).collect();
            let request = request.concat();
            let mut stream = connect(address);
            stream.write_all(&request).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            let answered = answer.starts_with(b"HTTP/1.1 ");
            assert_eq!(
                answered,
                is_whole(&request),
                "{}",
                String::from_utf8_lossy(&request)
            );
            assert!(answered || answer.is_empty());
        }
        assert!(ask(address, GET).ends_with("xxxxx"));
    }

    #[test]
    fn clients__that_never_end_their_request_hold_up_nobody() {
        let (address, _) = start(5, LONG);
        let slow: Vec<TcpStream> = (0..10 * CONNECTIONS_MAX)
            .map(|_| {
                let mut stream = connect(address);
                stream.write_all(b"GET /metrics HT").unwrap();
                stream
            })
            .collect();
        assert!(ask(address, GET).ends_with("xxxxx"));
        // The server has closed all but the last ones.
        for mut stream in &slow[..9 * CONNECTIONS_MAX] {
            let ended = stream.read(&mut [0; 1]);
            assert!(
                matches!(ended, Ok(0)) || ended.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset)
            );
        }
    }

    #[test]
    fn clients__that_never_read_hold_up_nobody() {
        // More bytes than the sockets buffer.
        const BYTES: usize = 8 << 20;
        let (address, rendered) = start(BYTES, LONG);
        let deaf: Vec<TcpStream> = (0..2 * CONNECTIONS_MAX)
            .map(|_| {
                let mut stream = connect(address);
                stream.write_all(GET).unwrap();
                stream
            })
            .collect();
        for _ in 0..2 {
            let answer = ask(address, GET);
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
            assert_eq!(body.len(), BYTES);
        }
        assert!(rendered.load(Ordering::Relaxed) >= 2);
        drop(deaf);
    }

    #[test]
    fn clients__have_a_bounded_time() {
        let (address, _) = start(5, Duration::from_millis(50));
        let mut stream = connect(address);
        stream.write_all(b"GET").unwrap();
        let ended = stream.read(&mut [0; 1]);
        assert!(matches!(ended, Ok(0)) || ended.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionReset));
    }
}
