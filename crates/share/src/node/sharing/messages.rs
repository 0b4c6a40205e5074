//! Work of other nodes: completions and messages of shared queue pairs, and events of peers.

use std::collections::BTreeSet;

use super::*;

impl Sharing {
    /// Handles the control channel. Returns whether there was anything.
    pub(in crate::node) fn look(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let instant = Instant::now();
        self.look_at_stalls(instant);
        let any = self.look_at_overdue(instant) | self.peers.look(instant);
        self.handle_events(egress, now) || any
    }

    /// Doubts the peers that have taken nothing since the last look: their nodes may have ended.
    fn look_at_stalls(&mut self, now: Instant) {
        if self.stalls_at.is_none_or(|at| now < at) {
            return;
        }
        self.stalls_at = None;
        let mut stalled = BTreeSet::new();
        for line in self.lines.values_mut() {
            let oldest = line.mux.oldest();
            if oldest.is_some() {
                self.stalls_at = Some(now + DOUBT_AFTER);
            }
            let before = std::mem::replace(&mut line.oldest, oldest);
            if oldest.is_some() && before == oldest {
                stalled.insert(line.peer.address);
            }
        }
        for address in stalled {
            self.peers.doubt(now, address);
        }
    }

    /// Lets go of regions that were deregistered long ago, although the nodes of peers do not answer. A peer that still writes into one makes its
    /// shared queue pair fail, as one does whose memory fails. Returns whether there were any.
    pub(super) fn look_at_overdue(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some((until, rkey)) = self.next_overdue()
            && until <= now
        {
            self.overdue.pop_front();
            for (id, line) in &mut self.lines {
                line.mux.release(rkey);
                line.touch(*id, &mut self.due);
            }
            any = true;
        }
        any
    }

    /// Handles a token of the node's event queue.
    pub(in crate::node) fn happened(&mut self, egress: &mut Egress<SendRequest>, now: Time, token: u64) {
        self.peers.happened(Instant::now(), token);
        self.handle_events(egress, now);
    }

    /// Returns when [`Sharing::look`] is to be called.
    pub(in crate::node) fn deadline(&mut self) -> Option<Instant> {
        let overdue = self.next_overdue().map(|(until, _)| until);
        let yielding = self.yielding.iter().map(|(_, until)| *until);
        let others = overdue
            .into_iter()
            .chain(self.stalls_at)
            .chain(self.peers.deadline());
        yielding.chain(others).min()
    }

    /// Prepares a sleep. Returns false if there is something to do.
    pub(in crate::node) fn prepare_sleep(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        mut watch: Option<&mut EngineWatch>,
    ) -> bool {
        arm(self.peers.shared_cq(), watch.as_deref_mut());
        let sleeps = self.peers.prepare_sleep(Instant::now(), watch);
        !self.handle_events(egress, now) && !self.poll(egress, now) && sleeps
    }

    /// Takes the key of a region that nobody uses any more, after [`Sharing::remove_region`].
    pub(in crate::node) fn next_region_gone(&mut self) -> Option<RKey> {
        self.regions_gone.pop()
    }

    /// Takes what a person should know.
    pub(in crate::node) fn take_warnings(&mut self) -> Vec<String> {
        self.peers.take_warnings()
    }

    /// Takes the slot of an application that gets queue pairs of its own from now on, since it has made too many shared ones fail.
    pub(in crate::node) fn next_quarantined(&mut self) -> Option<u32> {
        self.quarantined.pop()
    }

    /// Forgets an application, which has left.
    pub(in crate::node) fn forget_application(&mut self, slot: u32) {
        self.quarantine.forget(slot);
    }

    /// Takes news for an application.
    pub(in crate::node) fn next_news(&mut self) -> Option<(Owner, News)> {
        self.news.pop_front()
    }

    /// Handles completions of shared queue pairs. Returns whether there were any.
    pub(in crate::node) fn poll(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let mut found = std::mem::take(&mut self.found);
        let count = self.peers.shared_cq().poll_many(BATCH, &mut found);
        if count > 0 {
            // Control messages that were sent before come first.
            self.look(egress, now);
        }
        for wc in found.drain(..) {
            let Some(id) = self.peers.shared_by_qpn(wc.qpn) else {
                continue;
            };
            if wc.wr_id & RECEIVE == 0 {
                if let Some(mux) = self.touch(id) {
                    mux.handle_completion(wc.wr_id, wc.status);
                }
            } else {
                if let Some(shared) = self.peers.shared_qp(id) {
                    shared.slot_came();
                }
                if wc.status == Status::Success {
                    self.message(id, (wc.wr_id & !RECEIVE) as u16, wc.byte_len);
                }
            }
            if wc.status != Status::Success {
                self.peers.end_qp(Instant::now(), id);
            }
        }
        self.found = found;
        self.work(egress, now);
        count > 0
    }

    /// Handles a message in a slot.
    fn message(&mut self, id: SharedId, slot: u16, length: u32) {
        let mut bytes = vec![0; (length as usize).min(SLOT_LEN)];
        let Some(shared) = self.peers.shared_qp(id) else {
            return;
        };
        // The slot is free once its bytes are here.
        if shared.read_slot(slot, 0, &mut bytes).is_err() {
            return self.fail_line(id);
        }
        if !self.ending.contains(&id) && shared.post_slot(slot).is_err() {
            self.peers.end_qp(Instant::now(), id);
        }
        // The peer may be a little ahead.
        if !self.lines.contains_key(&id) && !self.add_line(id) {
            return self.fail_line(id);
        }
        let Some((line, mut keys)) = line!(self, id) else {
            return;
        };
        let received = line.mux.handle_message(&bytes, &mut keys);
        self.received(id, &bytes, received);
    }

    fn received(&mut self, id: SharedId, bytes: &[u8], received: Result<Option<Received>, Violation>) {
        let mut received = match received {
            Ok(Some(received)) => received,
            Ok(None) => return,
            Err(_) => return self.fail_line(id),
        };
        let Some(qpn) = self.connections.get(&(id, received.id)).copied() else {
            return;
        };
        let Some((owner, domain)) = self.qps.get(&qpn).map(|qp| (qp.owner, qp.domain)) else {
            return;
        };
        let body = bytes.get(HEADER_LEN..).unwrap_or_default();
        for copy in &received.copies {
            let bytes = body.get(copy.from..copy.from + copy.to.length as usize);
            let range = (copy.to.addr, u64::from(copy.to.length));
            let region = self
                .regions
                .get(domain, LKey(copy.to.lkey), range, Access::LOCAL_WRITE);
            let written = region.zip(bytes).is_some_and(|(region, bytes)| {
                let at = region.place(copy.to.addr);
                at.is_some_and(|at| region.spec.memory.write_in_any_order(at, bytes).is_ok())
            });
            if !written {
                received.completion.status = Status::LocalQpOperation;
            }
        }
        self.news.push_back((owner, News::Received(received.completion)));
        if received.completion.status != Status::Success
            && let Some(mux) = self.touch(id)
        {
            mux.fail(received.id);
        }
    }

    /// Ends a shared queue pair for good, with its connections.
    pub(super) fn fail_line(&mut self, id: SharedId) {
        if let Some(mux) = self.touch(id) {
            mux.close();
        }
        self.peers.fail_qp(Instant::now(), id);
    }

    /// Posts the messages of the nodes, and handles what has happened to connections and queue pairs.
    pub(in crate::node) fn work(&mut self, egress: &mut Egress<SendRequest>, now: Time) {
        loop {
            // What becomes of early messages depends on what happens to queue pairs.
            for id in std::mem::take(&mut self.early) {
                self.touch(id);
            }
            while let Some(id) = self.due.pop() {
                self.work_on(egress, now, id);
            }
            self.look_at_ending();
            self.look_at_yielding();
            if !self.take_events(egress, now) && self.due.is_empty() {
                break;
            }
        }
        self.release();
    }

    pub(super) fn work_on(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId) {
        #[cfg(test)]
        {
            self.looks += 1;
        }
        if let Some(line) = self.lines.get_mut(&id) {
            let qps = &self.qps;
            let by = &line.by;
            line.mux
                .answer_strays(|own, peer| qps.get(&own).is_some_and(|qp| qp.may_join(by, peer)));
            if line.mux.has_early() {
                self.early.insert(id);
            }
        }
        while let Some((line, mut keys)) = line!(self, id) {
            let Some(post) = line.mux.poll_message(&mut keys) else {
                break;
            };
            self.post_all(id, [post]);
        }
        if let Some(line) = self.lines.get_mut(&id) {
            line.is_due = false;
            let peer = line.peer;
            self.ask_for_keys(peer);
        }
        while let Some(event) = self.lines.get_mut(&id).and_then(|line| line.mux.poll_event()) {
            self.connection_has_news(egress, now, id, event);
        }
        let Some(line) = self.lines.get(&id) else { return };
        if line.mux.wants_to_resume() {
            self.peers.want_qp(Instant::now(), &line.by);
        } else if line.mux.is_unused() && self.peers.shared_qp(id).is_none() {
            self.peers.forget_qp(Instant::now(), id);
            self.remove_line(egress, id);
        }
    }

    /// Tells which queue pairs have nothing more to come.
    fn look_at_ending(&mut self) {
        for id in std::mem::take(&mut self.ending) {
            let slots = self.peers.shared_qp(id).map_or(0, |shared| shared.slots_out());
            let is_drained = self.lines.get(&id).is_none_or(|line| line.mux.is_drained());
            match slots == 0 && is_drained {
                true => self.drained(id),
                false => self.ending.push(id),
            }
        }
    }

    /// Decides whether a queue pair goes. One that was used since it was asked before stays; if another one is to have its place, only a few times.
    pub(super) fn may_end(&mut self, id: SharedId, for_room: bool) {
        let now = Instant::now();
        self.touch(id);
        let Some(line) = self.lines.get_mut(&id) else {
            return self.peers.may_end(now, id, true);
        };
        let activity = line.mux.activity();
        let (before, stayed) = line.seen;
        if activity != before && (!for_room || stayed < STAYS_MAX) {
            line.seen = (activity, stayed + u32::from(for_room));
            return self.peers.may_end(now, id, false);
        }
        line.seen = (activity, 0);
        line.mux.hold();
        self.yielding.push((id, now + HOLD_TIME));
    }

    /// Lets go of queue pairs on which nothing is in flight any more.
    fn look_at_yielding(&mut self) {
        for (id, until) in std::mem::take(&mut self.yielding) {
            let now = Instant::now();
            let Some(line) = self.lines.get_mut(&id) else {
                continue;
            };
            let is_held = line.mux.is_held();
            if is_held && !line.mux.is_empty() && now < until {
                self.yielding.push((id, until));
                continue;
            }
            let may = is_held && line.mux.is_empty();
            if is_held && !may {
                self.resume(id);
            }
            // One that has ended meanwhile needs no answer.
            self.peers.may_end(now, id, may);
        }
    }

    fn resume(&mut self, id: SharedId) {
        if let Some(mux) = self.touch(id) {
            let posts = mux.resume();
            self.post_all(id, posts);
        }
    }

    fn drained(&mut self, id: SharedId) {
        let line = self.lines.get(&id);
        let messages = line.map_or(0, |line| line.mux.messages_handled());
        self.peers.drained(Instant::now(), id, messages);
    }

    pub(super) fn connection_has_news(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        id: SharedId,
        event: Event,
    ) {
        let qp_of = |sharing: &Sharing, connection| {
            let qpn = sharing.connections.get(&(id, connection))?;
            let qp = sharing.qps.get(qpn)?;
            Some((*qpn, qp.owner, qp.flow))
        };
        match event {
            Event::Wake(connection) => {
                if let Some((_, _, flow)) = qp_of(self, connection) {
                    egress.release(now, flow);
                }
            }
            Event::Landed(tag, status) => {
                if let Some(piece) = PieceId::of_wr_id(tag) {
                    match status {
                        Status::Success => egress.completed(now, piece),
                        failed => egress.failed(now, piece, failed),
                    }
                }
            }
            Event::Answer(connection, list, original) => {
                if !self.write_shadows(list.as_slice(), &original.to_ne_bytes())
                    && let Some(mux) = self.touch(id)
                {
                    mux.fail(connection);
                }
            }
            Event::Culprit(connection) => {
                if let Some((_, owner, _)) = qp_of(self, connection)
                    && self.quarantine.caused(Instant::now(), owner.application)
                {
                    self.quarantined.push(owner.application);
                }
            }
            Event::Received(connection, completion) => {
                if let Some((_, owner, _)) = qp_of(self, connection) {
                    self.news.push_back((owner, News::Received(completion)));
                }
            }
            Event::Failed(connection, failure) => {
                if let Some((qpn, owner, flow)) = qp_of(self, connection) {
                    egress.fail(now, flow);
                    if let Some(qp) = self.qps.get_mut(&qpn) {
                        qp.state = QpState::Error;
                    }
                    self.news.push_back((owner, News::Failed(failure)));
                }
            }
            Event::Released(rkey) => self.use_ended(rkey),
            Event::Ended(_) => {}
        }
    }

    fn ask_for_keys(&mut self, peer: PeerId) {
        while let Some((domain, rkey)) = self.keys.get_mut(&peer).and_then(PeerKeys::poll_wanted) {
            self.ticket += 1;
            self.tickets.insert(self.ticket, (peer, domain, rkey));
            self.peers
                .resolve_key(Instant::now(), peer, (domain, rkey), self.ticket);
        }
    }

    fn handle_events(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let any = self.take_events(egress, now);
        if any {
            self.work(egress, now);
        }
        any
    }

    fn take_events(&mut self, egress: &mut Egress<SendRequest>, now: Time) -> bool {
        let mut any = false;
        while let Some(event) = self.peers.next_event() {
            any = true;
            self.handle_event(egress, now, event);
        }
        any
    }

    fn handle_event(&mut self, egress: &mut Egress<SendRequest>, now: Time, event: PeerEvent) {
        match event {
            PeerEvent::Bound {
                qpn,
                peer,
                dest,
                binding,
            } => self.bound(egress, now, qpn, (peer, dest), &binding),
            PeerEvent::Own { qpn, .. } => {
                if self
                    .qps
                    .get(&qpn)
                    .is_some_and(|qp| matches!(qp.stage, Stage::Asking))
                {
                    self.becomes_own(qpn);
                }
            }
            // A connection that is on a shared queue pair tells by itself, in order, when it ends.
            PeerEvent::Unbound { qpn } => {
                let waits = |qp: &Virtual| matches!(qp.stage, Stage::Wanting(..));
                if self.qps.get(&qpn).is_some_and(waits) {
                    self.fail_unbound(qpn, Failure::Shared);
                }
            }
            // Nobody would tell when a key of it is gone, and its next run gives other names.
            PeerEvent::Gone { peer } => {
                self.keys.remove(&peer);
                self.tickets.retain(|_, (of, ..)| *of != peer);
            }
            PeerEvent::RegionReleased { rkey } => self.use_ended(rkey),
            PeerEvent::Key { ticket, key } => self.key_told(ticket, key),
            PeerEvent::KeyGone {
                asked,
                peer,
                domain,
                rkey,
            } => {
                if let Some(keys) = self.keys.get_mut(&peer) {
                    keys.forget(domain, rkey);
                }
                let in_flight = self.in_flight(|line| line.peer == peer);
                self.going.push((asked, in_flight));
            }
            PeerEvent::QpReady { id } => self.ready(egress, now, id),
            // One that was wanted since it was refused is not.
            PeerEvent::QpRefused { by } if self.peers.is_qp_coming(&by) => {}
            PeerEvent::QpRefused { by } => {
                let qpns = self.waiting_for(&by);
                self.waiting.remove(&by);
                for (qpn, _) in qpns {
                    self.fail_unbound(qpn, Failure::Shared);
                }
            }
            PeerEvent::QpEnding { id } => {
                if let Some(mux) = self.touch(id) {
                    mux.stop();
                }
                self.yielding.retain(|(other, _)| *other != id);
                self.ending.push(id);
            }
            PeerEvent::QpOverdue { id } => {
                self.ending.retain(|other| *other != id);
                self.drained(id);
            }
            PeerEvent::QpEnded { id, ended } => {
                let Ended {
                    own,
                    theirs,
                    messages,
                } = *ended;
                if let Some(mux) = self.touch(id)
                    && mux.carry_over(own, theirs, messages).is_err()
                {
                    self.fail_line(id);
                }
            }
            PeerEvent::MayEnd { id, for_room } => self.may_end(id, for_room),
            PeerEvent::QpGone { id } => self.gone(egress, now, id),
        }
    }

    fn key_told(&mut self, ticket: u64, key: Option<RemoteKey>) {
        let Some((peer, domain, rkey)) = self.tickets.remove(&ticket) else {
            return;
        };
        let answer = key.map(|key| {
            let extent = Extent {
                start: key.start,
                length: key.length,
                access: Access::from_bits_truncate(key.access),
            };
            (key.rkey, extent)
        });
        self.keys.entry(peer).or_default().answered(domain, rkey, answer);
        let of_peer = |(id, line): (&SharedId, &Line)| (line.peer == peer).then_some(*id);
        let ids: Vec<SharedId> = self.lines.iter().filter_map(of_peer).collect();
        for id in ids {
            if let Some(mux) = self.touch(id) {
                mux.keys_answered();
            }
        }
    }

    /// Has a connection go over a shared queue pair.
    pub(super) fn bound(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        qpn: Qpn,
        (peer, dest): (PeerId, Qpn),
        binding: &Binding,
    ) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let path = qp
            .states
            .first()
            .and_then(|(_, attributes)| attributes.path.as_ref());
        let (Stage::Asking, Some(path)) = (&qp.stage, path) else {
            return;
        };
        let by = SharedBy {
            peer,
            here: qp.tenant.0.clone(),
            there: binding.tenant.clone(),
            class: path.traffic_class,
        };
        let bound = Bound {
            own: qpn,
            peer: dest,
            domain: qp.domain,
            peer_domain: binding.domain,
            peer_access: Access::from_bits_truncate(binding.access),
            replays_writes: qp.replays_writes,
        };
        qp.stage = Stage::Wanting(by.clone(), bound);
        self.waiting.entry(by.clone()).or_default().insert(qpn);
        if let Some(id) = self.peers.want_qp(Instant::now(), &by) {
            self.ready(egress, now, id);
        }
    }

    /// Has the connections that wait for a shared queue pair go over it.
    fn ready(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId) {
        let Some(shared) = self.peers.shared_qp(id) else {
            return;
        };
        let by = shared.by().clone();
        let waiting = self.waiting_for(&by);
        if let Some((_, tenant)) = waiting.first().copied() {
            let has_line = self.lines.contains_key(&id) || self.add_line(id);
            if !has_line || !self.add_group(egress, now, id, tenant) {
                return self.fail_line(id);
            }
        }
        self.waiting.remove(&by);
        for (qpn, _) in waiting {
            self.join(egress, now, id, qpn);
        }
        self.resume(id);
    }

    /// Returns the queue pairs whose connections wait for a shared one, with their tenants.
    fn waiting_for(&self, by: &SharedBy) -> Vec<(Qpn, TenantId)> {
        let waits = |qpn: &Qpn| {
            let qp = self.qps.get(qpn)?;
            // Others have been left or connected anew since.
            matches!(&qp.stage, Stage::Wanting(its, _) if its == by).then_some((*qpn, qp.tenant.1))
        };
        let known = self.waiting.get(by).into_iter().flatten();
        known.filter_map(waits).collect()
    }

    fn join(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId, qpn: Qpn) {
        let (Some(line), Some(qp)) = (self.lines.get_mut(&id), self.qps.get_mut(&qpn)) else {
            return;
        };
        let Stage::Wanting(_, bound) = &qp.stage else {
            return;
        };
        let receiver = qp
            .receiver
            .take()
            .unwrap_or_else(|| Receiver::new(qp.receives_max));
        let connection = match line.mux.bind(*bound, receiver) {
            Ok(connection) => connection,
            Err(receiver) => {
                qp.receiver = Some(receiver);
                return self.fail_unbound(qpn, Failure::Shared);
            }
        };
        qp.stage = Stage::Shared(id, connection);
        self.connections.insert((id, connection), qpn);
        if let Some((group, _)) = line.group {
            egress.bind(now, qp.flow, group);
        }
        while let Some((line, mut keys)) = line!(self, id) {
            let Some(bytes) = line.mux.poll_early() else { break };
            let received = line.mux.handle_early(&bytes, &mut keys);
            self.received(id, &bytes, received);
        }
    }

    /// Adds the state machine of a shared queue pair, stopped. Returns false if the node has no memory for it.
    fn add_line(&mut self, id: SharedId) -> bool {
        let line = self.make_line(id);
        let is_there = line.is_some();
        if let Some(line) = line {
            self.lines.insert(id, line);
        }
        is_there
    }

    fn make_line(&mut self, id: SharedId) -> Option<Line> {
        let shared = self.peers.shared_qp(id)?;
        if shared.slots_there() != SLOTS {
            return None;
        }
        let by = shared.by().clone();
        let bytes = usize::from(Mux::buffers_of(SLOTS)) * SLOT_LEN;
        let buffers = Arc::new(AnonymousMemory::new(bytes).ok()?);
        let pd = self.peers.pd();
        let buffers_region = pd.reg_mr_all(buffers.clone(), 0, Access::empty()).ok()?;
        let mut mux = Mux::new(SLOTS);
        mux.stop();
        Some(Line {
            mux,
            group: None,
            buffers_region,
            buffers,
            peer: by.peer,
            by,
            seen: (0, 0),
            oldest: None,
            is_due: false,
        })
    }

    /// Adds a shared queue pair to the scheduler, for its first connection.
    fn add_group(
        &mut self,
        egress: &mut Egress<SendRequest>,
        now: Time,
        id: SharedId,
        tenant: TenantId,
    ) -> bool {
        let (Some(line), Some(shared)) = (self.lines.get_mut(&id), self.peers.shared_qp(id)) else {
            return false;
        };
        let info = shared.qp().query();
        if line.group.is_none()
            && let Some(info) = info
        {
            let options = GroupOptions {
                class: class_of(line.by.class),
                path_mtu: info.path_mtu,
                depth: DEPTH,
                slots: Some(shared.rd_atomic().into()),
                may_be_quiet: false,
            };
            let group = egress.add_group(now, tenant, &options);
            line.group = group.map(|group| (group, tenant));
        }
        self.lines.get(&id).is_some_and(|line| line.group.is_some())
    }

    /// Ends the connections of a shared queue pair that is gone.
    fn gone(&mut self, egress: &mut Egress<SendRequest>, now: Time, id: SharedId) {
        if let Some(line) = self.lines.get_mut(&id) {
            line.mux.close();
        }
        self.ending.retain(|other| *other != id);
        self.yielding.retain(|(other, _)| *other != id);
        self.work_on(egress, now, id);
        let of_line: Vec<_> = self
            .connections
            .iter()
            .filter(|((its, _), _)| *its == id)
            .map(|(key, qpn)| (*key, *qpn))
            .collect();
        for (key, qpn) in of_line {
            self.connections.remove(&key);
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.stage = Stage::Over;
                egress.unbind(now, qp.flow);
            }
        }
        self.remove_line(egress, id);
    }

    fn remove_line(&mut self, egress: &mut Egress<SendRequest>, id: SharedId) {
        let Some(line) = self.lines.remove(&id) else {
            return;
        };
        if let Some((group, _)) = line.group {
            egress.remove_group(group);
        }
    }
}
