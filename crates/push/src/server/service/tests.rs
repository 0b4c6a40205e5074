//! The service with a driver that keeps its jobs until a test runs them.

use std::path::Path;

use rdmux_wire::push::{Access as Mode, ChangeKind, Conflict, ErrorCode, Name};

use super::*;
use crate::region::Region;
use crate::server::session::tests::{bytes, hello, proof_of};
use rdmux_key::Key;

const NOW: Duration = Duration::from_secs(1);
const BREAK_TIMEOUT: Duration = Duration::from_secs(5);

/// Jobs that have not run, and the messages to each client.
#[derive(Debug, Default)]
struct Held {
    jobs: Vec<Job>,
    sent: Vec<(ClientId, Message)>,
    registered: Vec<(ClientId, MappingId)>,
}

impl Driver for Held {
    fn register(
        &mut self,
        client: ClientId,
        map: &Map,
        _: Arc<Mapped>,
        _: Access,
    ) -> Result<Registered, String> {
        self.registered.push((client, map.mapping));
        Ok(Registered {
            extent: None,
            ways: map.region.ways(),
        })
    }

    fn deregister(&mut self, client: ClientId, mapping: MappingId) {
        self.registered.retain(|known| *known != (client, mapping));
    }

    fn send(&mut self, client: ClientId, _: ReplySlot, _: u64, message: &Message) -> bool {
        self.sent.push((client, message.clone()));
        true
    }

    fn receive(&mut self, _: ClientId, _: usize) -> bool {
        true
    }

    fn disconnect(&mut self, _: ClientId, _: bool) {}

    fn work(&mut self, job: Job) -> Option<Finished> {
        if job.is_immediate() {
            return Some(job.run());
        }
        self.jobs.push(job);
        None
    }

    fn let_others(&mut self, _: RegionId) {}

    fn is_alone(&mut self, _: RegionId) -> bool {
        true
    }
}

const CLIENTS: [ClientId; 2] = [ClientId(1), ClientId(2)];

/// Returns a service with the regions "file", of this path, and "memory", and with two clients.
fn service(path: &Path) -> Service<Held> {
    let regions = vec![
        Region::file(name("file"), path, Some(4096), false).unwrap(),
        Region::anonymous(name("memory"), 4096).unwrap(),
    ];
    let shared = Shared {
        key: Key::new([1; 32]),
        regions: regions.into_iter().map(Arc::new).collect(),
        keepalive_ms: 5_000,
        mappings_max: 4,
        messages_max: 3,
    };
    let mut service = Service::new(Held::default(), Arc::new(shared), BREAK_TIMEOUT);
    for client in CLIENTS {
        service.handle_connected(NOW, client, [127, 0, 0, 1].into(), [6; 32]);
        service.handle_message(NOW, client, 0, &bytes(&hello()));
        service.handle_message(NOW, client, 0, &bytes(&proof_of(1, [client.0 as u8; 16])));
        assert!(service.is_ready(client));
    }
    service.driver.sent.clear();
    service
}

fn name(name: &str) -> Name {
    Name::new(name).unwrap()
}

impl Service<Held> {
    /// Asks for all of a region, for this client alone.
    fn ask(&mut self, client: ClientId, region: &str) {
        let map = Message::Map {
            region: name(region),
            access: Mode::WRITE,
            share: Mode::empty(),
            conflict: Conflict::Break,
            offset: 0,
            length: 0,
            transfer: 0,
        };
        self.handle_message(NOW, client, 1, &bytes(&map));
    }

    /// Runs the oldest job.
    fn run_job(&mut self) {
        let finished = self.driver.jobs.remove(0).run();
        self.finished(NOW, finished);
    }

    /// Returns the messages since the last call.
    fn sent(&mut self) -> Vec<(ClientId, Message)> {
        std::mem::take(&mut self.driver.sent)
    }
}

#[test]
fn map__a_file_system_that_does_not_answer_holds_up_no_other_client() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut service = service(file.path());
    let [first, second] = CLIENTS;
    service.ask(first, "file");
    assert_eq!(service.sent(), []);
    service.ask(second, "memory");
    assert!(matches!(&*service.sent(), [(to, Message::Mapped { .. })] if *to == second));
    service.run_job();
    assert!(matches!(&*service.sent(), [(to, Message::Mapped { .. })] if *to == first));
}

#[test]
fn map__the_lease_is_revoked_before_the_file_is_found() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut service = service(file.path());
    let [first, second] = CLIENTS;
    service.ask(first, "file");
    service.ask(second, "file");
    service.handle_timeout(NOW + BREAK_TIMEOUT);
    assert!(
        matches!(&*service.sent(), [(to, Message::Error { code: ErrorCode::Revoked, .. })] if *to == first)
    );
    service.run_job();
    assert_eq!((service.sent(), &*service.driver.registered), (vec![], &[][..]));
    service.run_job();
    assert!(matches!(&*service.sent(), [(to, Message::Mapped { .. })] if *to == second));
}

#[test]
fn map__another_client_wants_the_range_before_the_file_is_found() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut service = service(file.path());
    let [first, second] = CLIENTS;
    service.ask(first, "file");
    service.ask(second, "file");
    assert_eq!(service.sent(), []);
    service.run_job();
    let sent = service.sent();
    let [
        (to_both, Message::Mapped { mapping, .. }),
        (to, Message::Notice { changes }),
    ] = &*sent
    else {
        panic!("{sent:?}");
    };
    assert_eq!([to_both, to], [&first, &first]);
    assert!(matches!(&**changes, [change] if (change.mapping, change.kind) == (*mapping, ChangeKind::Break)));
}

#[test]
fn map__the_client_ends_before_the_file_is_found() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut service = service(file.path());
    let [first, second] = CLIENTS;
    service.ask(first, "file");
    service.handle_disconnected(NOW, first, None);
    service.run_job();
    assert_eq!((service.sent(), &*service.driver.registered), (vec![], &[][..]));
    service.ask(second, "file");
    service.run_job();
    assert!(matches!(&*service.sent(), [(to, Message::Mapped { .. })] if *to == second));
}
