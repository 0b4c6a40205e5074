//! `rdmux perf push-read` and `push-write`: time that a client of the push service waits, by each way to durability; the table of the SMB3
//! Push Mode deck (SDC 2019).

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use rdmux_push::client::{Buffer, Part, Wait, Way};
use rdmux_push::{
    Access, Client, Domain, Key, MapRequest, Mapping, Options, Placement, Target, local_address_towards,
};
use rdmux_verbs::Device;
use serde::Serialize;

use crate::cmd::serve::{domain_words, load_key};
use crate::output::{self, Align};

/// Numbers of requests in flight, as in the deck.
const DEPTHS: [usize; 3] = [1, 2, 8];
/// Bytes of a request.
const SIZES: [u32; 2] = [4096, 65536];
/// Bytes of the region that the tests use.
const SPAN: u64 = 256 << 20;
/// Maximum time of a cell, however many requests it was to have.
const CELL: Duration = Duration::from_secs(3);
/// Longest time that the histogram distinguishes, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;
/// Time that a server started here may take to begin.
const STARTING: Duration = Duration::from_secs(10);

/// What only these two tests take.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct PushArgs {
    /// Push tests without HOST: file that the started server serves, as in `rdmux serve --file` [default: a file in /dev/shm that is
    /// declared to be persistent memory (ADR)].
    #[arg(long, value_name = "SPEC", help_heading = "push-read, push-write")]
    serve: Option<String>,
    /// Push tests without HOST: CPU of the started server.
    #[arg(long, value_name = "CPU", help_heading = "push-read, push-write")]
    server_pin: Option<usize>,
    /// Push tests: file with the server's key [default: your own].
    #[arg(long, value_name = "FILE", help_heading = "push-read, push-write")]
    key: Option<PathBuf>,
    /// Push tests: print the table in Markdown.
    #[arg(long, conflicts_with = "json", help_heading = "push-read, push-write")]
    markdown: bool,
    /// Push tests: draw the table as SVG into a file.
    #[arg(long, value_name = "FILE", help_heading = "push-read, push-write")]
    svg: Option<PathBuf>,
}

/// Values of the options that all tests take.
#[derive(Debug)]
pub(super) struct Common<'a> {
    pub(super) writes: bool,
    pub(super) target: Option<&'a str>,
    pub(super) size: Option<u32>,
    pub(super) iterations: u32,
    pub(super) sleeps: bool,
    pub(super) pin: Option<usize>,
    pub(super) bind: Option<std::net::IpAddr>,
    pub(super) json: bool,
}

/// Way in which the bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// By message, with the server's processor.
    Ordinary,
    /// RDMA READ alone.
    Read,
    /// RDMA WRITE, made durable in that way.
    Push(Way),
}

impl Method {
    fn of(writes: bool) -> Vec<Method> {
        if writes {
            let ways = [Way::SoftwareFlush, Way::Flush, Way::ReadAfterWrite];
            [Method::Ordinary]
                .into_iter()
                .chain(ways.map(Method::Push))
                .collect()
        } else {
            vec![Method::Ordinary, Method::Read]
        }
    }

    fn title(self) -> &'static str {
        match self {
            Method::Ordinary => "message",
            Method::Read => "RDMA READ",
            Method::Push(Way::SoftwareFlush) => "WRITE, software flush",
            Method::Push(Way::Flush) => "WRITE, FLUSH",
            Method::Push(Way::ReadAfterWrite) => "WRITE, READ",
        }
    }
}

/// A cell of the table.
#[derive(Clone, Debug, Serialize)]
struct Cell {
    method: &'static str,
    bytes: u32,
    depth: usize,
    requests: u64,
    p50_us: f64,
    p99_us: f64,
    mean_us: f64,
    /// Processor time for a request: here of the server's own code, below of its NIC. Only of a server that was started here.
    server_application_us: Option<f64>,
    server_nic_us: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    test: &'static str,
    domain: &'static str,
    durable: bool,
    carrier: &'static str,
    client_cpu: Option<usize>,
    server_cpu: Option<usize>,
    client_waits: &'static str,
    server_waits: &'static str,
    cells: Vec<Cell>,
}

/// A server that was started to be measured.
struct Server {
    child: Child,
    address: String,
    folder: PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Server {
    fn start(args: &PushArgs, common: &Common) -> Result<Server> {
        let place = if std::path::Path::new("/dev/shm").is_dir() {
            "/dev/shm".into()
        } else {
            std::env::temp_dir()
        };
        let folder = place.join(format!("rdmux-perf-{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        let own = format!("{}/region,size={SPAN},domain=adr", folder.display());
        let mut spec = args.serve.clone().unwrap_or(own);
        spec.push_str(",name=perf");
        let address = common
            .bind
            .map_or("127.0.0.1".to_owned(), |bind| bind.to_string());
        // A service of this run's own, numbered by its process. The number is no UDP port, so ports in use by others do not matter.
        let port = 20_000 + std::process::id() % 20_000;
        let address = if address.contains(':') {
            format!("[{address}]:{port}")
        } else {
            format!("{address}:{port}")
        };
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            "serve", "--json", "--quiet", "--listen", &address, "--file", &spec,
        ]);
        if let Some(cpu) = args.server_pin {
            command.args(["--cpu", &cpu.to_string()]);
        }
        if !common.sleeps {
            command.arg("--poll");
        }
        if let Some(key) = &args.key {
            command.arg("--key").arg(key);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut server = Server {
            child,
            address,
            folder,
        };
        let out = server.child.stdout.take().context("the server's output")?;
        let (tx, rx) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let _ = BufReader::new(out).read_line(&mut line);
            let _ = tx.send(line);
        });
        let line = rx.recv_timeout(STARTING).unwrap_or_default();
        ensure!(!line.is_empty(), "the server did not start");
        Ok(server)
    }

    /// Returns the processor time so far, in nanoseconds: of the server's own threads, and of its NIC's.
    fn cpu_ns(&self) -> Option<(u64, u64)> {
        let (mut application, mut nic) = (0, 0);
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id())).ok()? {
            let path = task.ok()?.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            let spent: u64 = (std::fs::read_to_string(path.join("schedstat")).ok()?)
                .split_whitespace()
                .next()?
                .parse()
                .ok()?;
            // The flush threads work for the NIC.
            let is_nic = ["rdmux-nic", "rdmux-flush", "rdmux-cm", "rdmux-wake"].contains(&name.trim());
            *if is_nic { &mut nic } else { &mut application } += spent;
        }
        Some((application, nic))
    }
}

pub(super) fn run(args: &PushArgs, common: &Common) -> Result<()> {
    let server = match common.target {
        None => Some(Server::start(args, common)?),
        Some(_) => None,
    };
    let target: Target = match (common.target, &server) {
        (Some(text), _) => text.parse()?,
        (None, Some(server)) => format!("rdmux://{}/perf", server.address).parse()?,
        (None, None) => bail!("no server"),
    };
    let key: Key = load_key(args.key.as_deref())?;
    let address = target.resolve()?[0];
    let from = match common.bind {
        Some(bind) => bind,
        None => local_address_towards(address.ip())?,
    };
    let options = Options {
        device: Some(Device::open(from)?),
        wait: if common.sleeps {
            Wait::Blocked
        } else {
            Wait::Polled
        },
        ..Options::default()
    };
    let mut client = Client::connect(address, &key, &options)?;
    let access = if common.writes {
        Access::READ | Access::WRITE
    } else {
        Access::READ
    };
    let mapping = client.map_as(&target.region, &MapRequest::new(access))?;
    let sizes: Vec<u32> = common.size.map_or(SIZES.to_vec(), |size| vec![size]);
    let largest = sizes.iter().copied().max().unwrap_or(0);
    ensure!(
        u64::from(largest) * DEPTHS[2] as u64 <= mapping.region_bytes(),
        "{target} has {} bytes, too few for {} requests of {largest}",
        mapping.region_bytes(),
        DEPTHS[2]
    );
    let methods = Method::of(common.writes);
    let mut bed = Bed {
        buffer: client.buffer(largest as usize * DEPTHS[2])?,
        client,
        mapping,
        span: 0,
        random: 0x9e37_79b9_7f4a_7c15,
        writes: common.writes,
    };
    bed.span = bed.mapping.region_bytes().min(SPAN);
    let mut cells = Vec::new();
    // Pages that nobody has touched cost more.
    bed.touch(largest)?;
    for bytes in &sizes {
        for depth in DEPTHS {
            for method in &methods {
                if !bed.offers(*method) {
                    continue;
                }
                // The first requests of a kind cost more.
                bed.cell(*method, *bytes, depth, common.iterations.min(200))?;
                let before = server.as_ref().and_then(Server::cpu_ns);
                let histogram = bed.cell(*method, *bytes, depth, common.iterations)?;
                let after = server.as_ref().and_then(Server::cpu_ns);
                let requests = histogram.len();
                let spent = before.zip(after).map(|(before, after)| {
                    let each =
                        |before: u64, after: u64| after.saturating_sub(before) as f64 / requests as f64 / 1e3;
                    (each(before.0, after.0), each(before.1, after.1))
                });
                cells.push(Cell {
                    method: method.title(),
                    bytes: *bytes,
                    depth,
                    requests,
                    p50_us: histogram.value_at_quantile(0.5) as f64 / 1e3,
                    p99_us: histogram.value_at_quantile(0.99) as f64 / 1e3,
                    mean_us: histogram.mean() / 1e3,
                    server_application_us: spent.map(|spent| spent.0),
                    server_nic_us: spent.map(|spent| spent.1),
                });
            }
        }
    }
    let domain = bed.mapping.domain();
    let waits = |sleeps: bool| if sleeps { "asleep" } else { "spinning" };
    let shared = std::env::var_os("RDMUX_SHM").is_none_or(|value| value != "off");
    let report = Report {
        test: if common.writes { "push-write" } else { "push-read" },
        domain: domain_words(domain),
        durable: bed.mapping.strongest() == Placement::PERSISTENT,
        carrier: match (&server, shared) {
            (Some(_), true) => "shared memory",
            (_, false) => "UDP",
            (None, true) => "shared memory if the server is on this host and of the same user, else UDP",
        },
        client_cpu: common.pin,
        server_cpu: args.server_pin,
        client_waits: waits(common.sleeps),
        server_waits: if server.is_some() {
            waits(common.sleeps)
        } else {
            "as it was started"
        },
        cells,
    };
    bed.client.close();
    if let Some(path) = &args.svg {
        std::fs::write(path, report.svg()).with_context(|| path.display().to_string())?;
    }
    let text = match (common.json, args.markdown) {
        (true, _) => serde_json::to_string(&report)?,
        (false, true) => report.markdown(),
        (false, false) => report.text(),
    };
    output::say(&text);
    if domain == Domain::None && common.writes {
        eprintln!("rdmux perf: the region does not survive a loss of power: the flushes were for visibility");
    }
    Ok(())
}

/// Objects that a cell is measured with.
struct Bed {
    client: Client,
    mapping: Mapping,
    buffer: Buffer,
    span: u64,
    random: u64,
    writes: bool,
}

impl Bed {
    fn offers(&self, method: Method) -> bool {
        match method {
            Method::Push(way) => self.mapping.way(self.mapping.strongest(), Some(way)).is_ok(),
            Method::Ordinary | Method::Read => true,
        }
    }

    fn touch(&mut self, bytes: u32) -> Result<()> {
        for at in (0..self.span).step_by(bytes as usize) {
            let bytes = bytes.min((self.span - at) as u32);
            self.post(
                if self.writes {
                    Method::Push(Way::Flush)
                } else {
                    Method::Read
                },
                at,
                bytes,
                0,
                false,
            )?;
            self.client.drain()?;
        }
        Ok(())
    }

    /// Posts one request; returns the number of its completions.
    fn post(&mut self, method: Method, offset: u64, bytes: u32, slot: u64, durable: bool) -> Result<u64> {
        let at = slot * u64::from(bytes);
        let region = self.mapping.region().clone();
        match method {
            Method::Read => self
                .client
                .post_read(&self.mapping, offset, &self.buffer, at, bytes, 0)?,
            Method::Ordinary if self.writes => {
                let kind = self.mapping.strongest();
                self.client
                    .post_ordinary_write(&region, offset, &self.buffer, at, bytes, kind, 0)?;
            }
            Method::Ordinary => {
                self.client
                    .post_ordinary_read(&region, offset, &self.buffer, at, bytes, 0)?
            }
            Method::Push(way) if durable => {
                let part = Part {
                    offset,
                    buffer: &self.buffer,
                    from: at,
                    length: bytes,
                };
                let (range, kind) = ((offset, bytes.into()), self.mapping.strongest());
                self.client
                    .post_write_and_flush(&self.mapping, part, range, kind, Some(way), [0; 2])?;
                return Ok(2);
            }
            Method::Push(_) => {
                self.client
                    .post_write(&self.mapping, offset, &self.buffer, at, bytes, 0)?;
            }
        }
        Ok(1)
    }

    fn cell(&mut self, method: Method, bytes: u32, depth: usize, requests: u32) -> Result<Histogram<u64>> {
        let mut histogram = Histogram::new_with_max(LONGEST_NS, 3)?;
        let mut begun: VecDeque<(Instant, u64)> = VecDeque::new();
        let end = Instant::now() + CELL;
        let mut posted = 0u64;
        while histogram.len() < requests.into() {
            while begun.len() < depth && posted < requests.into() && Instant::now() < end {
                // xorshift: offsets without order, the same in each run.
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                let offset = self.random % (self.span / u64::from(bytes)) * u64::from(bytes);
                let begin = Instant::now();
                let parts = self.post(method, offset, bytes, posted % depth as u64, true)?;
                begun.push_back((begin, parts));
                posted += 1;
            }
            let Some((begin, parts)) = begun.pop_front() else {
                break;
            };
            for _ in 0..parts {
                self.client.next_done()?;
            }
            histogram.saturating_record(begin.elapsed().as_nanos() as u64);
        }
        Ok(histogram)
    }
}

impl Report {
    fn methods(&self) -> Vec<&'static str> {
        let mut methods: Vec<&str> = Vec::new();
        for cell in &self.cells {
            if !methods.contains(&cell.method) {
                methods.push(cell.method);
            }
        }
        methods
    }

    /// Returns the rows of the table: size and depth, and the cell of each method.
    fn rows(&self) -> Vec<(u32, usize, Vec<&Cell>)> {
        let mut rows: Vec<(u32, usize, Vec<&Cell>)> = Vec::new();
        for cell in &self.cells {
            match rows
                .iter_mut()
                .find(|row| (row.0, row.1) == (cell.bytes, cell.depth))
            {
                Some(row) => row.2.push(cell),
                None => rows.push((cell.bytes, cell.depth, vec![cell])),
            }
        }
        rows
    }

    fn conditions(&self) -> String {
        let cpu = |cpu: Option<usize>| cpu.map_or("free".to_owned(), |cpu| format!("CPU {cpu}"));
        format!(
            "{}: client {} on {}, server {} on {}; over {}; domain {}, done when {}",
            self.test,
            self.client_waits,
            cpu(self.client_cpu),
            self.server_waits,
            cpu(self.server_cpu),
            self.carrier,
            self.domain,
            match (self.test, self.durable) {
                ("push-read", _) => "here",
                (_, true) => "durable",
                (_, false) => "visible",
            }
        )
    }

    fn cell(cells: &[&Cell], method: &str, show: impl Fn(&Cell) -> String) -> String {
        let cell = cells.iter().find(|cell| cell.method == method);
        cell.map_or("-".into(), |cell| show(cell))
    }

    fn text(&self) -> String {
        let methods = self.methods();
        let table = |show: &dyn Fn(&Cell) -> String| {
            let mut columns = vec![("bytes", Align::Right), ("depth", Align::Right)];
            columns.extend(methods.iter().map(|method| (*method, Align::Right)));
            let rows: Vec<Vec<String>> = (self.rows().into_iter())
                .map(|(bytes, depth, cells)| {
                    let mut row = vec![output::bytes(bytes.into()), depth.to_string()];
                    row.extend(methods.iter().map(|method| Report::cell(&cells, method, show)));
                    row
                })
                .collect();
            output::table(&columns, &rows)
        };
        let mut text = self.conditions();
        text += "\n\nus a request, p50 (p99)\n";
        text += &table(&|cell| format!("{:.1} ({:.1})", cell.p50_us, cell.p99_us));
        if self.cells.iter().any(|cell| cell.server_nic_us.is_some()) {
            text += "\n\nserver, us of processor time a request: application + soft NIC\n";
            text += &table(&|cell| {
                let us = |us: Option<f64>| us.map_or("-".into(), |us| format!("{us:.1}"));
                format!("{} + {}", us(cell.server_application_us), us(cell.server_nic_us))
            });
        }
        text
    }

    fn markdown(&self) -> String {
        let methods = self.methods();
        let mut text = format!(
            "{}. Microseconds a request, p50 (p99); below, processor time of the server's application and of its soft NIC.\n\n",
            self.conditions()
        );
        let _ = writeln!(text, "| bytes | depth | {} |", methods.join(" | "));
        let _ = writeln!(text, "|---|---|{}", "---|".repeat(methods.len()));
        for (bytes, depth, cells) in self.rows() {
            let shown = methods.iter().map(|method| {
                Report::cell(&cells, method, |cell| {
                    let mut shown = format!("{:.1} ({:.1})", cell.p50_us, cell.p99_us);
                    if let (Some(application), Some(nic)) = (cell.server_application_us, cell.server_nic_us) {
                        let _ = write!(shown, "<br>{application:.1} + {nic:.1}");
                    }
                    shown
                })
            });
            let shown: Vec<String> = shown.collect();
            let _ = writeln!(
                text,
                "| {} | {depth} | {} |",
                output::bytes(bytes.into()),
                shown.join(" | ")
            );
        }
        text.trim_end().to_owned()
    }

    /// Draws bars of p50, a group for each size and depth.
    fn svg(&self) -> String {
        const COLOURS: [&str; 4] = ["#9a9a9a", "#4e79a7", "#e15759", "#59a14f"];
        let (methods, rows) = (self.methods(), self.rows());
        let bar = 22.0;
        let group = bar * methods.len() as f64 + 24.0;
        let (left, top, height) = (60.0, 56.0, 260.0);
        let width = left + group * rows.len() as f64 + 20.0;
        let most = self.cells.iter().map(|cell| cell.p50_us).fold(1.0, f64::max);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"8\" y=\"16\">{}</text>\n",
            top + height + 60.0,
            escaped(&self.conditions())
        );
        for (nth, method) in methods.iter().enumerate() {
            let x = left + nth as f64 * 170.0;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.0}\" y=\"26\" width=\"11\" height=\"11\" fill=\"{}\"/><text x=\"{:.0}\" y=\"36\">{}</text>",
                COLOURS[nth % COLOURS.len()],
                x + 16.0,
                escaped(method)
            );
        }
        for (nth, (bytes, depth, cells)) in rows.iter().enumerate() {
            let x = left + group * nth as f64;
            for cell in cells {
                let at = methods
                    .iter()
                    .position(|method| *method == cell.method)
                    .unwrap_or(0);
                let tall = cell.p50_us / most * height;
                let (x, y) = (x + bar * at as f64, top + height - tall);
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{}\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"8\">{:.1}</text>",
                    bar - 2.0,
                    COLOURS[at % COLOURS.len()],
                    x + bar / 2.0 - 1.0,
                    y - 3.0,
                    cell.p50_us
                );
            }
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} x {depth}</text>",
                x + (group - 24.0) / 2.0,
                top + height + 18.0,
                output::bytes(u64::from(*bytes))
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"8\" y=\"{:.0}\">us, p50</text>\n</svg>",
            top + height + 40.0
        );
        svg
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let cell = |method, bytes, depth, p50_us| Cell {
            method,
            bytes,
            depth,
            requests: 1,
            p50_us,
            p99_us: 2.0 * p50_us,
            mean_us: p50_us,
            server_application_us: Some(0.5),
            server_nic_us: Some(1.5),
        };
        Report {
            test: "push-write",
            domain: "ADR",
            durable: true,
            carrier: "UDP",
            client_cpu: Some(0),
            server_cpu: None,
            client_waits: "spinning",
            server_waits: "spinning",
            cells: vec![
                cell("message", 4096, 1, 20.0),
                cell("WRITE, FLUSH", 4096, 1, 4.0),
                cell("message", 4096, 2, 30.0),
            ],
        }
    }

    #[test]
    fn text__a_row_a_size_and_depth_and_a_dash_where_nothing_was_measured() {
        let text = report().text();
        assert!(text.starts_with("push-write: client spinning on CPU 0, server spinning on free; over UDP; domain ADR, done when durable"));
        assert!(text.contains("4 KiB      1  20.0 (40.0)     4.0 (8.0)"), "{text}");
        assert!(text.contains("4 KiB      2  30.0 (60.0)             -"), "{text}");
        assert!(text.contains("0.5 + 1.5"), "{text}");
    }

    #[test]
    fn markdown__is_a_table() {
        let text = report().markdown();
        assert!(
            text.contains("| bytes | depth | message | WRITE, FLUSH |\n|---|---|---|---|\n"),
            "{text}"
        );
        assert!(
            text.contains("| 4 KiB | 1 | 20.0 (40.0)<br>0.5 + 1.5 | 4.0 (8.0)<br>0.5 + 1.5 |"),
            "{text}"
        );
    }

    #[test]
    fn svg__a_bar_a_cell() {
        let svg = report().svg();
        // The background, two in the legend, three bars.
        assert_eq!(svg.matches("<rect").count(), 6);
        assert!(svg.ends_with("</svg>\n"));
    }
}
