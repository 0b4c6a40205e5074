//! What several of the tests here begin with.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use rdmux_verbs::*;

pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Connects two queue pairs, the first of which asks as `params` say. Their connections.
pub(crate) fn connect(client: &QueuePair, server: &QueuePair, params: &ConnectParams) -> [Connection; 2] {
    let [asking, asked] = [client, server].map(|qp| qp.pd().device());
    let listener = asked.listen(7174).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            assert_eq!(&request.private_data()[..5], b"hello");
            let connection = request
                .accept(server, &ConnectParams::default(), b"welcome")
                .unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = SocketAddr::new(asked.address(), 7174);
        let connection = asking.connect(client, peer, params, b"hello").unwrap();
        assert_eq!(&connection.private_data()[..7], b"welcome");
        [connection, accepting.join().unwrap()]
    })
}
