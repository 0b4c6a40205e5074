//! The sink: accepts connections, lets peers write and read its memory, and receives.

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use rdmux_verbs::{
    CompletionQueue, ConnectParams, Connection, Device, MemoryRegion, QpOptions, Qpn, QueuePair, RecvRequest,
    Status, WcOpcode,
};

use super::super::child::say_ready;
use super::source::PAUSE;
use super::{Place, Request, SinkArgs, memory};

const CQ_ENTRIES: u32 = 16_384;
/// Time after which the thread that receives looks for messages of new connections, at the latest.
const LOOK: Duration = Duration::from_millis(100);
/// New connections after which those that have ended are dropped.
const DROP_EVERY: usize = 64;

/// Connections that receive.
type Receivers = Mutex<HashMap<Qpn, (QueuePair, Request)>>;

/// Serves until its standard input ends. When its device goes, it opens it again.
pub(super) fn run(args: &SinkArgs) -> Result<()> {
    thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0)
    });
    let device = Device::open(args.bind)?;
    serve(&device, args, true)?;
    loop {
        match Device::open(args.bind) {
            // Sources learn from their own device if it does not go on.
            Ok(device) => drop(serve(&device, args, false)),
            // A node that comes back tells nobody.
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Accepts connections until the device goes.
fn serve(device: &Device, args: &SinkArgs, is_first: bool) -> Result<()> {
    let pd = device.alloc_pd()?;
    let mr = Arc::new(memory(&pd)?);
    let cq = device.create_cq(CQ_ENTRIES)?;
    let listener = device.listen(args.port)?;
    let receivers = Arc::new(Receivers::default());
    let receive = {
        let (cq, mr, receivers) = (cq.clone(), mr.clone(), receivers.clone());
        move || receive(&cq, &mr, &receivers)
    };
    thread::spawn(receive);
    if is_first {
        say_ready()?;
    }
    let place = Place {
        va: mr.iova(),
        rkey: mr.rkey(),
    };
    let mut connections: Vec<(QueuePair, Connection)> = Vec::new();
    while let Some(mut asking) = listener.accept(Duration::MAX) {
        if connections.len() % DROP_EVERY == DROP_EVERY - 1 {
            let mut receivers = lock(&receivers);
            connections.retain(|(qp, connection)| {
                let goes_on = !connection.is_ended();
                if !goes_on {
                    receivers.remove(&qp.qpn());
                }
                goes_on
            });
        }
        let Some(request) = Request::parse(asking.private_data()) else {
            asking.reject(b"no source");
            continue;
        };
        let options = QpOptions {
            max_send_wr: 1,
            max_recv_wr: u32::from(request.receives.max(1)),
            ..QpOptions::new(&cq)
        };
        let qp = pd.create_qp(&options)?;
        if request.receives > 0 {
            lock(&receivers).insert(qp.qpn(), (qp.clone(), request));
        }
        let post = || (0..request.receives).try_for_each(|_| post(&qp, &mr, request.bytes));
        // A source that has gone meanwhile is no concern of the others.
        if let Ok(connection) = asking.accept_after(&qp, &ConnectParams::default(), &place.emit(), || {
            Ok(post().map_err(std::io::Error::other)?)
        }) {
            connections.push((qp, connection));
        }
    }
    Ok(())
}

fn lock(receivers: &Receivers) -> std::sync::MutexGuard<'_, HashMap<Qpn, (QueuePair, Request)>> {
    receivers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn post(qp: &QueuePair, mr: &MemoryRegion, bytes: u32) -> Result<(), rdmux_verbs::PostError> {
    qp.post_recv(RecvRequest {
        wr_id: 0,
        sges: mr.sge(0, bytes).into(),
    })
}

/// Posts a receive for each that has completed, at once or after the time that the source has asked for.
fn receive(cq: &CompletionQueue, mr: &MemoryRegion, receivers: &Receivers) {
    let mut later: VecDeque<(Instant, QueuePair, u32)> = VecDeque::new();
    loop {
        let now = Instant::now();
        while let Some((due, qp, bytes)) = later.front()
            && *due <= now
        {
            let _ = post(qp, mr, *bytes);
            later.pop_front();
        }
        let wait = later.front().map_or(LOOK, |(due, ..)| *due - now);
        let found = match cq.poll() {
            Some(found) => found,
            None => match cq.wait(wait) {
                Ok(Some(found)) => found,
                Ok(None) => continue,
                // The device has gone, and with it all connections.
                Err(_) => return,
            },
        };
        if found.status != Status::Success || found.opcode != WcOpcode::Recv {
            continue;
        }
        let of = lock(receivers).get(&found.qpn).cloned();
        let Some((qp, request)) = of else {
            continue;
        };
        if request.delay.is_zero() {
            // The queue pair of a source that has gone takes no receives.
            let _ = post(&qp, mr, request.bytes);
        } else {
            later.push_back((Instant::now() + request.delay, qp, request.bytes));
        }
    }
}
